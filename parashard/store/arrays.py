"""Arrays by name as safetensors: a file's content, and whole files.

Owns which errors of the library mean content that cannot be used. Knows no checkpoint and no job. The library is
imported by the first read or write: a process has neither at its start. Called by `parashard.checkpoints.tensors`, and
where weights are given, kept at a job's end or handed to another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from parashard.errors import BadData
from parashard.plan.variables import Float32s


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


def to_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return a file's content; arrays must be contiguous."""
    from safetensors.numpy import save

    return save(dict(arrays))
