"""Arrays by name as safetensors: a file's content, and whole files.

Owns which errors of the library mean content that cannot be used. Knows no checkpoint and no job. The library is
imported by the first read or write: a process has neither at its start. Called by `parashard.checkpoints.tensors`, and
where weights are given, kept at a job's end or handed to another process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parashard.errors import BadData
from parashard.plan.variables import Float32s

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""safetensors' names of NumPy's dtypes; the last come first in a file, so that an array begins where its dtype may."""
_RANKS = {dtype: rank for rank, dtype in enumerate(reversed(_DTYPES))}


def read_arrays(path: Path) -> dict[str, Float32s]:
    """Return the arrays of a file by name; their dtype is what the file says.

    Raises
    ------
    BadData
        If it cannot be read as safetensors of dtypes that NumPy has.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError, TypeError, AttributeError) as error:  # the last two: dtypes that NumPy lacks
        raise BadData(f"{path}: cannot be read as safetensors: {error}") from None


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, str] | None = None) -> None:
    """Write arrays by name, and what a reader should know of them; in place, and not synced.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(dict(arrays), path, dict(about or {}) or None)
    except SafetensorError as error:  # the library's own error for a full disk
        raise OSError(str(error)) from error


def from_bytes(content: bytes) -> dict[str, Float32s]:
    """Return the arrays in a file's content; their dtype is what it says.

    Raises
    ------
    ValueError
        If it is not safetensors of dtypes that NumPy has.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(content)
    except (SafetensorError, KeyError) as error:  # the last, and ValueError: dtypes that NumPy lacks
        raise ValueError(repr(error)) from None


def to_bytes(arrays: Mapping[str, NDArray[Any]]) -> memoryview:
    """Return a file's content; arrays must be contiguous.

    The bytes are those of `safetensors.numpy.save`, which copies twice and holds the interpreter meanwhile: 27 ms for
    64 MiB, in which a shard would answer nobody.
    """
    ordered = sorted(arrays.items(), key=lambda one: (_RANKS[one[1].dtype.name], one[0]))
    about, end = {}, 0
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        about[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": (begin, end)}
    header = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    content = np.empty(8 + len(header) + end, np.uint8)
    content[: 8 + len(header)] = np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8)
    begin = 8 + len(header)
    for _, array in ordered:
        content[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        begin += array.nbytes
    return content.data
