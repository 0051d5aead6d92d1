"""A step in pieces: its gradient, and whether loss and metrics of the parts of some examples make those of all.

A loss or metric that is no mean over examples has figures that depend on the batch size; it is tried on a batch and on
its halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from parashard.data.base import Array, Batch, Indices
from parashard.data.tree import leaves, map_leaves, rows_of
from parashard.errors import ConfigurationError
from parashard.metrics import Mean, Metric, Sums
from parashard.models.base import FrameworkModel, Initial, LooksUp, Model, TellsMetrics, adds_losses, for_thread
from parashard.models.declaration import parts_of
from parashard.models.evaluation import Totals, no_means
from parashard.models.framework import host_array
from parashard.models.looking_up import placed
from parashard.models.user_errors import warn
from parashard.plan.embedding import Keys
from parashard.plan.state import COUNTER, SUM
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Float32s

EXAMPLES_TRIED = 32
LOSSES_APART = 0.05  # of a loss: what is drawn at random may differ by as much
_INSTEAD = "Compute the loss of each example (reduction='none') and return the .mean() of these"


def piece_size(examples: int, pieces: int) -> int:
    """Return how many examples a piece of a step has; the last piece may have fewer."""
    return -(-examples // pieces)


def piece_sizes(steps: StepPlan, pieces: int) -> list[int]:
    """Return how many examples the pieces of a job's steps have: first those of most, then others, descending."""
    found: dict[int, None] = {}
    for examples in (steps.size(0), *([steps.short] if steps.short else [])):
        size = piece_size(examples, pieces)
        found |= dict.fromkeys([size, examples % size or size])
    first, *others = found
    return [first, *sorted(others, reverse=True)]


class Accumulated:
    """A model whose gradient is computed in pieces of a batch, one after the other: the mean over all its examples."""

    def __init__(self, model: Model, pieces: int) -> None:
        self._model, self._pieces = model, pieces
        variables = [parts_of(name, initial)[0] for name, initial in model.initial_variables().items()]
        self._state = {variable.name: variable.state for variable in variables}
        self._metrics = Totals()
        self.evaluate = model.evaluate
        self.adds_losses = adds_losses(model)
        self.share: Callable[[Batch, Batch], float] = getattr(model, "share", _share_of_rows)
        self.counts_rows: Callable[[Batch], bool] = getattr(model, "counts_rows", lambda piece: True)
        self.tables: Any = getattr(model, "tables", ())

    def keys(self, batch: Batch) -> Mapping[str, Array]:
        """Return the model's own, of one that looks rows up."""
        assert isinstance(self._model, LooksUp), "only a model with tables is asked"
        return self._model.keys(batch)

    def initial_variables(self) -> Mapping[str, Initial]:
        """Return the model's own."""
        return self._model.initial_variables()

    def for_thread(self) -> Accumulated:
        """Return the same of a model for another thread."""
        return Accumulated(for_thread(self._model), self._pieces)

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array | None]]:
        """Return the loss and gradients of all examples: the pieces' by their shares; what is added up is their sum."""
        rows = rows_of(batch.inputs)
        size = piece_size(rows, self._pieces)
        total, sums = 0.0, dict[str, Any]()
        self._metrics = Totals()
        losses: list[Sums] = []
        for part, start in enumerate(range(0, rows, size)):
            piece = _cut(batch, part, slice(start, min(rows, start + size)))
            if batch.keys:
                piece = self._placed(piece, batch.keys, xp)
            loss, gradients = self._model.loss_and_gradients(variables, piece, xp)
            assert isinstance(gradients, Mapping), "a model that a trainer takes has gradients"
            if isinstance(self._model, TellsMetrics):
                self._tell(self._model.step_metrics(), float(loss), rows_of(piece.inputs), losses)
            share, of_rows = self.share(piece, batch), _share_of_rows(piece, batch)
            total += float(loss) * share if share else 0.0  # where nothing counts the loss is NaN
            for name, gradient in gradients.items():
                state = self._state.get(name, "")  # of one that has a gradient, and of a table
                factor = 1.0 if state in (COUNTER, SUM) else of_rows if state else share
                counted = xp.asarray(gradient) * xp.float32(factor) if factor and gradient is not None else None
                if name not in sums or sums[name] is None:
                    sums[name] = counted
                elif counted is not None:
                    sums[name] += counted
        return total, sums

    def _tell(self, told: Mapping[str, Any], loss: float, examples: int, losses: list[Sums]) -> None:
        """Add the metrics of a piece; and its loss, if that of a piece is no mean over its examples."""
        own = told.get("loss")
        losses.append(own or Sums(Metric(), [loss * examples, examples]))
        self._metrics.add({name: sums for name, sums in told.items() if name != "loss"}, examples)
        if own is not None or "loss" in self._metrics.sums:
            metric = own.metric if own is not None else self._metrics.sums["loss"].metric
            self._metrics.sums["loss"] = Sums(metric, sum(one.values for one in losses))

    @property
    def added_metrics(self) -> Mapping[str, Metric]:
        """The model's own."""
        return self._model.added_metrics if isinstance(self._model, TellsMetrics) else {}

    def step_metrics(self) -> Mapping[str, Sums]:
        """Return the metrics of all pieces of the last batch; none of a model that tells none."""
        return self._metrics.sums

    def _placed(self, piece: Batch, keys: Mapping[str, Keys], xp: Any) -> Batch:
        """Return a piece with the rows of its whole batch, and where its own keys have theirs among them."""
        on_host = replace(piece, inputs=map_leaves(host_array, piece.inputs))
        places = placed(self._model, on_host, keys, keys).places
        return replace(piece, keys=keys, places={name: xp.asarray(place) for name, place in places.items()})


def _share_of_rows(piece: Batch, whole: Batch) -> float:
    """Return how much the loss of a piece counts where it is a mean over examples."""
    return rows_of(piece.inputs) / rows_of(whole.inputs)


def _cut(batch: Batch, part: int, rows: slice | Indices) -> Batch:
    inputs, targets = map_leaves(lambda array: array[rows], (batch.inputs, batch.targets))
    weights = None if batch.weights is None else batch.weights[rows]
    indices = batch.indices[rows] if len(batch.indices) == rows_of(batch.inputs) else batch.indices
    return Batch(batch.step, batch.epoch, indices, inputs, targets, weights, part)


# --- whether loss and metrics are means ---


class Splitting(NamedTuple):
    """How examples are split."""

    judges: bool  # they are evaluated in several batches
    pieces: int = 1  # of a step
    round_steps: int = 1  # of a round whose mean is taken
    batch_parts: int = 1  # of a batch that several workers share


def needs_means(model: Model, parts: Splitting) -> bool:
    """Tell whether something of a model is put together as a mean over examples."""
    if not isinstance(model, FrameworkModel) or not getattr(model, "tells_means", True):
        return False
    by_function = any(isinstance(metric, Mean) for metric in getattr(model, "_metrics", {}).values())
    return by_function or parts.judges or max(parts.pieces, parts.round_steps, parts.batch_parts) > 1


def check_means(
    model: Model, values: Mapping[str, Float32s], keys: Mapping[str, Keys], batch: Batch, parts: Splitting
) -> bool:
    """Warn of a loss that is no mean over examples, refuse such a metric; return whether losses of parts give one."""
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
    divisor = getattr(model, "loss_divisor", lambda batch: "")(batch)
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
    """Return whether a batch's loss is the mean of its halves', as far as is known without compiling the model."""
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


def _part(model: Model, keys: Mapping[str, Keys], batch: Batch, part: Indices) -> Batch:
    some = replace(_cut(batch, 0, part), indices=part)
    return placed(model, some, keys, keys) if keys else some
