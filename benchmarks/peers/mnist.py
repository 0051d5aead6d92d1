"""MNIST for the peers: its four files as arrays, with nothing but NumPy."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def load(folder: Path, split: str) -> tuple[Bytes, Bytes]:
    """Return (images, shape (n, 784); labels, shape (n,)) of "train" or "t10k"."""
    images = _values(folder, f"{split}-images-idx3-ubyte", 16).reshape(-1, 784)
    return images, _values(folder, f"{split}-labels-idx1-ubyte", 8)


def _values(folder: Path, name: str, header_bytes: int) -> Bytes:
    """Return what follows the header of a file, which may be compressed."""
    plain = folder / name
    content = plain.read_bytes() if plain.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
    return np.frombuffer(content, np.uint8)[header_bytes:]
