"""Batch.cut: it takes some examples, and keeps all else."""

from __future__ import annotations

import numpy as np

from parashard.data.base import Batch


def test_a_cut_has_some_examples_and_all_else_unchanged() -> None:
    inputs = {"user": np.arange(4.0), "pixels": np.arange(8.0).reshape(4, 2)}
    keys = {"users": np.arange(3, dtype=np.uint64)}
    batch = Batch(7, 1, np.arange(10, 14), inputs, np.arange(4), np.arange(4.0), share=0.5, keys=keys)
    cut = batch.cut(slice(1, 3))
    assert (cut.step, cut.epoch, cut.share, cut.keys) == (7, 1, 0.5, keys)
    assert cut.indices.tolist() == [11, 12]
    assert (cut.inputs["user"].tolist(), cut.inputs["pixels"].tolist()) == ([1, 2], [[2, 3], [4, 5]])
    assert (cut.targets.tolist(), cut.weights.tolist()) == ([1, 2], [1, 2])


def test_a_cut_keeps_indices_that_are_not_one_for_each_example() -> None:
    batch = Batch(0, 0, np.arange(2), np.arange(6.0), np.arange(6))
    assert batch.cut(slice(0, 3)).indices.tolist() == [0, 1]
