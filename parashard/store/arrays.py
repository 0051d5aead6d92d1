"""Arrays by name as safetensors: a file's content, and whole files.

Owns the translation of the library's errors, and bfloat16, which the library's part for NumPy lacks: files have it as
BF16, arrays as `parashard.plan.embedding.BFLOAT16`. Knows no checkpoint and no job.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, load_file

from parashard.errors import BadData
from parashard.plan.embedding import BFLOAT16
from parashard.plan.variables import Float32s

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    BFLOAT16.name: "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""safetensors' names of NumPy's dtypes; the last come first in a file, so that each array is aligned for its dtype."""
_RANKS = {dtype: rank for rank, dtype in enumerate(reversed(_DTYPES))}
_HEAD = struct.Struct("<Q")  # the length of the header, which is JSON; data begin behind it, at a multiple of 8 bytes
_ALIGNED = 8


def read_arrays(path: Path) -> dict[str, Float32s]:
    """Return the arrays of a file by name, in the file's dtypes."""
    try:
        return load_file(path)
    except (OSError, SafetensorError, TypeError, AttributeError) as error:  # the last two: dtypes that NumPy lacks
        raise BadData(f"{path}: cannot be read as safetensors: {error}") from None


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, str] | None = None) -> None:
    """Write arrays by name, with `about` as metadata; in place, and without fsync."""
    path.write_bytes(to_bytes({name: np.ascontiguousarray(array) for name, array in arrays.items()}, about))


def from_bytes(content: bytes | memoryview) -> dict[str, Float32s]:
    """Return the arrays in a file's content, in the file's dtypes, BFLOAT16 among them."""
    header, _ = _header_of(content)
    halves = [name for name, entry in header.items() if entry.get("dtype") == "BF16" and name != "__metadata__"]
    try:
        arrays = load(_renamed(content, halves, "U16") if halves else bytes(content))
    except (SafetensorError, KeyError) as error:  # the last, and ValueError: dtypes that NumPy lacks
        raise ValueError(repr(error)) from None
    return arrays | {name: arrays[name].view(BFLOAT16) for name in halves}


def to_bytes(arrays: Mapping[str, NDArray[Any]], about: Mapping[str, str] | None = None) -> memoryview:
    """Return a file's content, with `about` as metadata; arrays must be contiguous."""
    # The bytes are those of `safetensors.numpy.save`, which copies twice and holds the GIL meanwhile: 27 ms for 64 MiB,
    # in which a shard would answer no request.
    ordered = sorted(arrays.items(), key=lambda one: (_RANKS[one[1].dtype.name], one[0]))
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": (begin, end)}
    head = _head(header)
    content = np.empty(len(head) + end, np.uint8)
    content[: len(head)] = np.frombuffer(head, np.uint8)
    begin = len(head)
    for _, array in ordered:
        content[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        begin += array.nbytes
    return content.data


def _header_of(content: bytes | memoryview) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the header of a file, and where its data begin; empty if it is malformed: the library raises then."""
    try:
        begin = _HEAD.size + _HEAD.unpack_from(content)[0]
        header = json.loads(bytes(content[_HEAD.size : begin]))
    except (struct.error, ValueError, RecursionError):
        return {}, 0
    right = isinstance(header, dict) and all(isinstance(entry, dict) for entry in header.values())
    return (header, begin) if right else ({}, 0)


def _renamed(content: bytes | memoryview, names: Iterable[str], dtype: str) -> bytes:
    """Return a file whose arrays of these names have another dtype of the same length."""
    header, begin = _header_of(content)
    for name in names:
        header[name]["dtype"] = dtype
    return b"".join((_head(header), memoryview(content)[begin:]))


def _head(header: Mapping[str, Any]) -> bytes:
    """Return the beginning of a file: the header and its length."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return _HEAD.pack(len(text)) + text
