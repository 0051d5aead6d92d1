"""Trial: one training of a task, as `ps.Trainer` and its `fit` take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Trial:
    """A task with the first values and the data of one seed.

    Attributes
    ----------
    model : Model
        Of `ps.Sequential`, `ps.torch.Model`, `ps.keras.Model` or `ps.jax.Model`; the seed determines its first values.
    optimizer : OptimizerSpec
        With the task's schedule.
    train, held_out : (inputs, targets)
        Arrays, as `fit` and its `validation_data` take them.
    epochs, batch_size : int
        Of one machine; every policy gets the same.
    metric : str
        Of the held-out examples: what the task is judged by.
    higher_is_better : bool
        True of accuracy and AUC, False of a loss.
    tolerance : float
        By how much the mean metric may be worse than one machine's: in the metric's units where higher is better, else
        as a fraction of one machine's metric.
    settings : mapping of str to object
        Further keys of a job file.
    """

    model: Any
    optimizer: Any
    train: tuple[Any, Any]
    held_out: tuple[Any, Any]
    epochs: int
    batch_size: int
    metric: str
    higher_is_better: bool
    tolerance: float
    settings: Mapping[str, Any] = field(default_factory=dict)
