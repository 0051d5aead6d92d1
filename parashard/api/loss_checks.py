"""What is said of a loss, and refused of a metric, that is no mean over examples: its figures depend on the batch size.

It is tried on a batch and on its halves. Knows no framework and no run. Called by `parashard.api.trained_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from parashard.api.user_calls import warn
from parashard.data.base import Batch, Indices
from parashard.data.tree import leaves, map_leaves, rows_of
from parashard.errors import ConfigurationError
from parashard.metrics import Mean
from parashard.models.base import FrameworkModel, Model, adds_losses
from parashard.models.evaluation import no_means
from parashard.models.looking_up import placed
from parashard.plan.embedding import Keys
from parashard.plan.variables import Float32s

EXAMPLES_TRIED = 32
LOSSES_APART = 0.05  # of a loss: what is drawn at random may differ by as much
_INSTEAD = "Compute the loss of each example (reduction='none') and return the .mean() of these"


class Splitting(NamedTuple):
    """How examples are split: evaluations, steps, rounds and batches.

    Attributes
    ----------
    judges : bool
        Examples are evaluated in several batches.
    pieces, round_steps : int
        Of a step, and of a round whose mean is taken.
    batch_parts : int
        Of a batch that several workers share.
    """

    judges: bool
    pieces: int = 1
    round_steps: int = 1
    batch_parts: int = 1


def needs_means(model: Model, parts: Splitting) -> bool:
    """Tell whether something of a model is put together as a mean over examples."""
    if not isinstance(model, FrameworkModel) or not getattr(model, "tells_means", True):
        return False
    by_function = any(isinstance(metric, Mean) for metric in getattr(model, "_metrics", {}).values())
    return by_function or parts.judges or max(parts.pieces, parts.round_steps, parts.batch_parts) > 1


def check_means(
    model: Model, values: Mapping[str, Float32s], keys: Mapping[str, Keys], batch: Batch, parts: Splitting
) -> bool:
    """Warn of a loss that is no mean over examples where something is computed in parts; refuse such a metric.

    Return whether the loss of a batch can be put together from those of its parts.

    Raises ConfigurationError if a metric is a function that returns no mean over examples.

    Parameters
    ----------
    values : mapping of str to ndarray of float32
        The present weights, and by table the rows of `keys`.
    keys : mapping of str to ndarray of uint64
        By table: all that the batch needs.
    """
    rows = min(EXAMPLES_TRIED, rows_of(batch.inputs))
    found = _no_means(model, values, keys, batch, rows)
    loss = found.pop("loss", None)
    for name, (whole, halves) in found.items():
        raise ConfigurationError(
            f"metric {name!r} is no mean over examples: of {rows} examples it is {whole:.4g}, and the mean of two "
            f"halves is {halves:.4g}, so its figure would depend on the size of the batches; give a class derived from "
            "ps.metrics.Metric with the sums that it is made of, or an object with update(outputs, targets), compute() "
            "and reset(), such as those of torchmetrics"
        )
    divisor = getattr(model, "loss_divisor", _unknown)(batch)
    wrong = []
    if parts.round_steps > 1 and (divisor or loss):
        wrong.append(
            f"the gradient of a round of {parts.round_steps} steps is the mean of theirs, not that of all its examples"
        )
    if parts.pieces > 1 and loss:
        wrong.append("the gradient of a step in pieces (gradient_accumulation) is the mean of theirs")
    if parts.judges and loss:
        wrong.append("the loss of an evaluation depends on the size of its batches")
    if wrong:
        what = (
            f"it divides by {divisor}"
            if divisor
            else "of {} examples it is {:.4g}, and the mean of two halves is {:.4g}"
        )
        told = what if divisor or loss is None else what.format(rows, *loss)
        warn(f"the loss is no mean over examples ({told}): {'; '.join(wrong)}. {_INSTEAD}")
    return loss is None or bool(divisor) or adds_losses(model)


def computes_at_once(model: Model) -> bool:
    """Tell whether a model computes without being compiled first, so that a step may be tried."""
    return not isinstance(model, FrameworkModel) or hasattr(model, "counts_rows")


def shares_batches(model: Model, values: Mapping[str, Float32s], keys: Mapping[str, Keys], batch: Batch) -> bool:
    """Return whether workers may share batches: the loss of one is the mean of its halves', as far as is known.

    A model that is compiled first is not computed here: it says of its loss what it knows (`means_losses`). Of a user's
    own model the loss of a batch is compared with the mean and with the sum of its halves'. Raises what the model does.
    """
    if not getattr(model, "means_losses", True):
        return False
    if not computes_at_once(model):
        return True
    whole = float(model.loss_and_gradients(values, batch, np)[0])
    rows = rows_of(batch.inputs)
    if isinstance(model, FrameworkModel) or adds_losses(model) or rows < 2:
        return True
    halves = [np.arange(rows // 2), np.arange(rows // 2, rows)]
    losses = [float(model.loss_and_gradients(values, _part(model, keys, batch, half), np)[0]) for half in halves]
    mean = sum(len(half) * loss for half, loss in zip(halves, losses, strict=True)) / rows
    is_sum = abs(whole - sum(losses)) < abs(whole - mean)
    return not is_sum or abs(whole - mean) <= LOSSES_APART * abs(whole)


def _no_means(
    model: Model, values: Mapping[str, Float32s], keys: Mapping[str, Keys], batch: Batch, rows: int
) -> dict[str, tuple[float, float]]:
    """Return the figures that are no means over examples; none, where halves of a batch cannot be computed."""
    for order in (_by_target(batch.targets, rows), np.arange(rows)) if rows > 1 else ():
        with suppress(Exception), np.errstate(all="ignore"):  # such as a metric that is not defined for one class
            return no_means(lambda part: model.evaluate(values, _part(model, keys, batch, part), np), order)
    return {}


def _by_target(targets: Any, rows: int) -> Indices:
    """Return the examples such that those with like targets are together: halves have other classes then."""
    first = leaves(targets)[0][1][:rows]
    return np.argsort(first.reshape(rows, -1).sum(axis=1, dtype=np.float64), kind="stable")


def _unknown(batch: Batch) -> str:
    return ""


def _part(model: Model, keys: Mapping[str, Keys], batch: Batch, part: Indices) -> Batch:
    def cut(array: Any) -> Any:
        return array[part]

    inputs, targets = map_leaves(cut, (batch.inputs, batch.targets))
    weights = None if batch.weights is None else cut(batch.weights)
    some = replace(batch, indices=part, inputs=inputs, targets=targets, weights=weights)
    return placed(model, some, keys, keys) if keys else some
