"""The bundled digits in the files of MNIST, for scripts that read those."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def written_as_mnist(folder: Path, side: int = 8) -> Path:
    """Write the digits as images of so many pixels a side, with a margin of noise."""
    digits, rng = load_digits(), np.random.default_rng(0)
    order = rng.permutation(len(digits.target))
    padded = rng.integers(0, 17, (len(order), side, side)).astype(np.float64)
    padded[:, :8, :8] = digits.images
    images, labels = (padded[order] * 255 / 16).astype(np.uint8), digits.target[order].astype(np.uint8)
    for split, some in (("train", slice(0, 1437)), ("t10k", slice(1437, None))):
        for kind, array in (("images-idx3", images[some]), ("labels-idx1", labels[some])):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / f"{split}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    return folder
