"""MNIST for the MLPs: images of 784 floats in [0, 1], labels of int64, and the constants that all of them share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from parashard.data.array_files import read_idx

HIDDEN, CLASSES, PIXELS = 128, 10, 784
EPOCHS, BATCH_SIZE, LEARNING_RATE = 5, 128, 1e-3


def read(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of "train" or "t10k"."""
    images = read_idx(folder / f"{split}-images-idx3-ubyte.gz", dimensions=3)
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte.gz", dimensions=1)
    return images.reshape(len(images), -1).astype(np.float32) / 255, labels.astype(np.int64)


def batches(examples: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return the indices of an epoch's batches, drawn without replacement."""
    order = np.random.default_rng((seed, epoch)).permutation(examples)
    return [order[start : start + BATCH_SIZE] for start in range(0, examples, BATCH_SIZE)]
