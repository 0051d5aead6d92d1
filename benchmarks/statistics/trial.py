"""Trial: one training of a task, as `ps.Trainer` and its `fit` take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Trial:
    """A task with the first values and the data of one seed."""

    # A `ps.Sequential`, `ps.torch.Model`, `ps.keras.Model` or `ps.jax.Model`; the seed determines its first values.
    model: Any
    optimizer: Any  # with the task's schedule
    # train, held_out: arrays, as `fit` and its `validation_data` take them.
    train: tuple[Any, Any]
    held_out: tuple[Any, Any]
    # epochs, batch_size: of one machine; every policy gets the same.
    epochs: int
    batch_size: int
    metric: str  # of the held-out examples, by which the task is judged
    higher_is_better: bool  # True of accuracy and AUC, False of a loss
    # By how much the mean metric may be worse than one machine's: in the metric's units where higher is better, else as
    # a fraction of one machine's metric.
    tolerance: float
    settings: Mapping[str, Any] = field(default_factory=dict)  # further keys of a job file
