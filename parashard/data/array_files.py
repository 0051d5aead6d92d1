"""Arrays in files: MNIST's four IDX files (LeCun, Cortes and Burges, 1998), and NumPy's .npz archive.

Declared sizes are checked before memory is allocated, and nothing is unpickled. IDX, big-endian: two
zero bytes, the type (8: unsigned byte), the number of dimensions, one uint32 per dimension, then the elements in
row-major order; compressed with gzip or not.
"""

from __future__ import annotations

import gzip
import math
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from parashard.data.arrays import AnyArray, ArraySource, Split, check_digits, class_labels, count_classes
from parashard.data.base import kind_of_failure
from parashard.data.labels import check_rounding, kind_of_array, kind_of_dtype, whole_numbers
from parashard.data.options import IdxOptions, NpzOptions, TargetKind
from parashard.errors import BadData, shown_names

_UNSIGNED_BYTE = 8
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_INFLATION = 1032  # maximum expansion by DEFLATE: a match of 258 bytes in two bits
_READ_BYTES = 1 << 20

Bytes = npt.NDArray[np.uint8]


def open_idx(options: IdxOptions) -> ArraySource:
    """Read the four files; BadData names the missing or damaged file, and the error."""
    training, held_out = _read_images(options.path, "train"), _read_images(options.path, "t10k")
    if training.inputs.shape[1:] != held_out.inputs.shape[1:]:
        raise BadData(
            f"{options.path}: the train images are {_by(training.inputs.shape[1:])} pixels, "
            f"the t10k images {_by(held_out.inputs.shape[1:])}"
        )
    return ArraySource(training, held_out, count_classes(training.targets, held_out.targets), input_scale=255.0)


def _read_images(folder: Path, prefix: str) -> Split:
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
    """Read an IDX file of unsigned bytes; gzip is detected by the first bytes."""
    # The array is allocated only after the declared size is checked against the file's: exactly, or under gzip against
    # the most that this many bytes can decompress to.
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
    while piece := stream.read(min(_READ_BYTES, elements - filled + 1)):  # one byte more, to detect a longer file
        if filled + len(piece) > elements:
            raise BadData(f"{path}: goes on after the {elements} bytes that it declares")
        room[filled : filled + len(piece)] = piece
        filled += len(piece)
    if filled < elements:
        raise BadData(f"{path}: ends after {filled} of the {elements} bytes that it declares")
    return content.reshape(shape)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, OSError, struct.error),
    *(
        ValueError,
        TypeError,
        SyntaxError,
        tokenize.TokenError,
        RecursionError,
        MemoryError,
    ),  # from a .npy header's text
    *(RuntimeError, NotImplementedError),  # from zipfile: encryption and versions that it does not know
)


def open_npz(options: NpzOptions) -> ArraySource:
    """Read the archive; BadData names the file and the array that is missing, damaged or of a type not allowed."""
    path = options.path
    try:
        archive = zipfile.ZipFile(path)
    except _DAMAGE as error:
        raise kind_of_failure(error)(f"{path}: cannot be read as an .npz archive: {error}") from error
    with archive:
        whole = _read_arrays(archive, path, options.inputs, options.targets, options.target)
        own = {options.held_out_inputs, options.held_out_targets} & _array_names(archive)
        held_out = None
        if own:
            names = options.held_out_inputs, options.held_out_targets
            held_out = _read_arrays(archive, path, *names, options.target, may_refuse=False)
    if not len(whole.targets):
        raise BadData(f"{path}: array {options.inputs!r} has no examples")
    if held_out is None:
        training, held_out = (whole.take(rows) for rows in options.rows(len(whole.targets)))
    else:
        training = whole
    if _kind(training) != _kind(held_out):
        raise BadData(f"{path}: examples have {_kind(training)} in training, but {_kind(held_out)} held out")
    is_classes = whole.targets.dtype == np.int64
    return ArraySource(training, held_out, count_classes(training.targets, held_out.targets) if is_classes else 0)


def _array_names(archive: zipfile.ZipFile) -> set[str]:
    return {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}


def _read_arrays(
    archive: zipfile.ZipFile,
    path: Path,
    inputs_name: str,
    targets_name: str,
    target: TargetKind | None,
    *,
    may_refuse: bool = True,
) -> Split:
    """Read a split; with `may_refuse`, targets whose dtype leaves their meaning open need `target`."""
    names = _array_names(archive)
    for name in (inputs_name, targets_name):
        if name not in names:
            raise BadData(f"{path}: has no array {name!r}; its arrays: {shown_names(sorted(names)) or 'none'}")
    inputs_origin, targets_origin = f"{path}: array {inputs_name!r}", f"{path}: array {targets_name!r}"
    archive_bytes = path.stat().st_size
    inputs = _read_array(archive, archive_bytes, inputs_name, inputs_origin)
    targets = _read_array(archive, archive_bytes, targets_name, targets_origin)
    if inputs.ndim < 2 or 0 in inputs.shape[1:]:
        raise BadData(f"{inputs_origin}: must have the shape (examples, features, ...), found {inputs.shape}")
    if targets.shape != inputs.shape[:1]:
        raise BadData(f"{targets_origin}: must have the shape {inputs.shape[:1]}, found {targets.shape}")
    if inputs.dtype != np.uint8:  # bytes stay bytes: a quarter of the memory
        check_digits(
            inputs, inputs_origin, "for ids use a table (csv or parquet), whose data.key_columns keep all digits"
        )
        inputs = _finite_float32(inputs, inputs_origin)
    given = targets
    if targets.dtype.kind == "f":
        targets = _finite_float32(targets, targets_origin)
    kind = target or (kind_of_array(targets, targets_origin) if may_refuse else kind_of_dtype(targets))
    if kind == "class":
        return Split(inputs, class_labels(whole_numbers(targets, targets_origin), targets_origin))
    check_rounding(given, targets_origin)
    return Split(inputs, _finite_float32(targets, targets_origin))


def _read_array(archive: zipfile.ZipFile, archive_bytes: int, name: str, origin: str) -> AnyArray:
    """Read one array after checking its header against the archive, so that no false size is allocated."""
    try:
        info = archive.getinfo(f"{name}.npy")
        if info.compress_type not in _METHODS:
            raise BadData(f"{origin}: must be stored or deflated, found zip method {info.compress_type}")
        if info.compress_size > archive_bytes or info.file_size > info.compress_size * _MAX_INFLATION:
            raise BadData(
                f"{origin}: declares {info.file_size} bytes out of {info.compress_size}, in a file of {archive_bytes}"
            )
        with archive.open(info) as member:
            shape, dtype = _header(member)
            declared = math.prod(shape) * dtype.itemsize
            held = info.file_size - member.tell()
        if dtype.kind not in "biuf":
            raise BadData(f"{origin}: must hold numbers, found dtype {dtype}")
        if declared != held:
            raise BadData(f"{origin}: declares {declared} bytes, but the archive holds {held}")
        with archive.open(info) as member:
            array: AnyArray = npy.read_array(member, allow_pickle=False)  # to its last byte, where zip checks the CRC
    except (KeyError, *_DAMAGE) as error:
        raise kind_of_failure(error)(f"{origin}: damaged: {error}") from error
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    version = npy.read_magic(member)
    if version == (1, 0):
        shape, _, dtype = npy.read_array_header_1_0(member)
    elif version == (2, 0):
        shape, _, dtype = npy.read_array_header_2_0(member)
    else:
        raise ValueError(f".npy version {version} (allowed: (1, 0) and (2, 0))")
    if any(n < 0 for n in shape):
        raise ValueError(f"shape {shape}")
    return shape, dtype


def _finite_float32(array: AnyArray, origin: str) -> AnyArray:
    with np.errstate(over="ignore"):
        values = array.astype(np.float32)
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))[0])
        raise BadData(f"{origin}: index {first} has a value that is not finite in float32")
    return values


def _kind(split: Split) -> str:
    targets = "class labels" if split.targets.dtype == np.int64 else "float targets"
    return f"inputs of shape {split.inputs.shape[1:]} with {targets}"
