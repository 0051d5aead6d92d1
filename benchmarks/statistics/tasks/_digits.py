"""Some of MNIST's digits: pixels from 0 to 1 in one row an image, and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.statistics.tasks import NoData
from parashard.data.array_files import read_idx


def digits(data: Path | None, split: str, some: slice) -> tuple[Any, Any]:
    """Return images and labels of "train" or "t10k".

    Raises
    ------
    NoData
        Without a folder.
    """
    if data is None:
        raise NoData
    images = read_idx(data / f"{split}-images-idx3-ubyte.gz", dimensions=3)[some]
    labels = read_idx(data / f"{split}-labels-idx1-ubyte.gz", dimensions=1)[some]
    return images.reshape(len(images), -1).astype(np.float32) / 255, labels.astype(np.int64)
