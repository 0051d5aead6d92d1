"""MNIST's own files: the four IDX files of LeCun, Cortes and Burges (1998), compressed with gzip or not.

Owns the reading of IDX; nothing that a file declares is trusted. The format, big-endian: two zero bytes, the type (8:
unsigned byte), the number of dimensions, one uint32 per dimension, then the elements in row-major order. Serves every
data set in the same files (Fashion-MNIST, KMNIST).
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from parashard.data.arrays import ArraySource, Split, class_labels, count_classes
from parashard.data.base import kind_of_failure
from parashard.data.options import IdxOptions
from parashard.errors import BadData

_UNSIGNED_BYTE = 8
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_INFLATION = 1032  # the most bytes that DEFLATE makes of one: a match of 258 bytes in two bits
_READ_BYTES = 1 << 20

Bytes = npt.NDArray[np.uint8]


def open_idx(options: IdxOptions) -> ArraySource:
    """Read the four files; BadData names the missing or damaged file, and the error."""
    training, held_out = _read_split(options.path, "train"), _read_split(options.path, "t10k")
    if training.inputs.shape[1:] != held_out.inputs.shape[1:]:
        raise BadData(
            f"{options.path}: the train images are {_by(training.inputs.shape[1:])} pixels, "
            f"the t10k images {_by(held_out.inputs.shape[1:])}"
        )
    return ArraySource(training, held_out, count_classes(training.targets, held_out.targets), input_scale=255.0)


def _read_split(folder: Path, prefix: str) -> Split:
    images_path = _find(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = _find(folder, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, dimensions=3), read_idx(labels_path, dimensions=1)
    if len(images) != len(labels):
        raise BadData(f"{labels_path} has {len(labels)} labels for the {len(images)} images of {images_path}")
    return Split(images, class_labels(labels, str(labels_path)))


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise BadData(f"{folder / name}: no such file, nor with .gz")


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Read an IDX file of unsigned bytes, compressed with gzip or not: the first bytes tell."""
    # The array is allocated only once the size that the file declares is known to fit the file's: exactly, or under
    # gzip within what that many bytes can decompress to.
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if not zipped:
                return _read(file, path, dimensions, size, size)
            with gzip.open(file) as inflated:
                return _read(inflated, path, dimensions, 4 + 4 * dimensions, size * _MAX_INFLATION)
    except EOFError as error:
        raise BadData(f"{path}: the gzip stream is truncated") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadData(f"{path}: the gzip stream is damaged: {error}") from error
    except OSError as error:
        raise kind_of_failure(error)(f"{path}: cannot be read: {error.strerror or error}") from error


def _read(stream: IO[bytes] | gzip.GzipFile, path: Path, dimensions: int, least: int, most: int) -> Bytes:
    """Read IDX from a stream that is known to hold at least `least` and at most `most` bytes."""
    header_bytes = 4 + 4 * dimensions
    header = stream.read(header_bytes)
    if len(header) < 4 or header[:2] != b"\0\0":
        raise BadData(f"{path}: not an IDX file: it must begin with two zero bytes, found {header[:4].hex(' ')!r}")
    if header[2] != _UNSIGNED_BYTE:
        raise BadData(f"{path}: elements must be unsigned bytes (IDX type 8), found type {header[2]}")
    if header[3] != dimensions:
        raise BadData(f"{path}: must have {dimensions} dimensions, found {header[3]}")
    if len(header) < header_bytes:
        raise BadData(f"{path}: truncated in the header, after {len(header)} of {header_bytes} bytes")
    shape = tuple(int(n) for n in np.frombuffer(header, ">u4", offset=4))
    elements = math.prod(shape)
    if elements == 0:
        raise BadData(f"{path}: declares {_by(shape)} elements, which is none")
    if not least <= header_bytes + elements <= most:
        raise BadData(f"{path}: declares {_by(shape)} bytes after its header, which does not fit the file's size")
    content = np.empty(elements, np.uint8)
    room, filled = content.data, 0
    while piece := stream.read(min(_READ_BYTES, elements - filled + 1)):  # one more: tells a file that goes on
        if filled + len(piece) > elements:
            raise BadData(f"{path}: goes on after the {elements} bytes that it declares")
        room[filled : filled + len(piece)] = piece
        filled += len(piece)
    if filled < elements:
        raise BadData(f"{path}: ends after {filled} of the {elements} bytes that it declares")
    return content.reshape(shape)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
