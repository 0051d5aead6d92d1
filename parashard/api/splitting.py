"""Steps in pieces: their gradient, and checks whether loss and metrics of parts combine to those of the whole.

A loss or metric that is not a mean over examples depends on the batch size; to detect that, it is computed for a batch
and for its halves.
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
from parashard.models.evaluation import Totals, figures_not_means
from parashard.models.framework import host_array
from parashard.models.looking_up import placed
from parashard.models.user_errors import warn
from parashard.plan.embedding import Keys
from parashard.plan.state import COUNTER, SUM
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Float32s

EXAMPLES_TRIED = 32
LOSSES_APART = 0.05  # relative tolerance of two losses, for randomness in the model
_INSTEAD = "Compute the loss of each example (reduction='none') and return the .mean() of these"


def piece_size(examples: int, pieces: int) -> int:
    """Return the number of examples in a piece of a step; the last piece may have fewer."""
    return -(-examples // pieces)


def piece_sizes(steps: StepPlan, pieces: int) -> list[int]:
    """Return the sizes of pieces in a job's steps: first the most common, then the others, descending."""
    found: dict[int, None] = {}
    for examples in (steps.size(0), *([steps.short] if steps.short else [])):
        size = piece_size(examples, pieces)
        found |= dict.fromkeys([size, examples % size or size])
    first, *others = found
    return [first, *sorted(others, reverse=True)]


class Accumulated:
    """A model that computes a batch's gradient in pieces, one after the other; the mean over all its examples."""

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
        """Return the wrapped model's keys; it must look up rows."""
        assert isinstance(self._model, LooksUp), "only a model with tables is asked"
        return self._model.keys(batch)

    def initial_variables(self) -> Mapping[str, Initial]:
        """Return the wrapped model's variables."""
        return self._model.initial_variables()

    def for_thread(self) -> Accumulated:
        """Return the same wrapper of a model for another thread."""
        return Accumulated(for_thread(self._model), self._pieces)

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array | None]]:
        """Return the loss and gradients of all examples: the pieces' weighted by share; counters and sums added up."""
        rows = rows_of(batch.inputs)
        size = piece_size(rows, self._pieces)
        total, sums = 0.0, dict[str, Any]()
        self._metrics = Totals()
        losses: list[Sums] = []
        for part, start in enumerate(range(0, rows, size)):
            piece = _piece(batch, part, slice(start, min(rows, start + size)))
            if batch.keys:
                piece = self._placed(piece, batch.keys, xp)
            loss, gradients = self._model.loss_and_gradients(variables, piece, xp)
            assert isinstance(gradients, Mapping), "a model that a trainer takes has gradients"
            if isinstance(self._model, TellsMetrics):
                self._tell(self._model.step_metrics(), float(loss), rows_of(piece.inputs), losses)
            share, of_rows = self.share(piece, batch), _share_of_rows(piece, batch)
            total += float(loss) * share if share else 0.0  # a piece whose targets are all ignored has loss NaN
            for name, gradient in gradients.items():
                state = self._state.get(name, "")  # "" for trained variables and tables
                factor = 1.0 if state in (COUNTER, SUM) else of_rows if state else share
                counted = xp.asarray(gradient) * xp.float32(factor) if factor and gradient is not None else None
                if name not in sums or sums[name] is None:
                    sums[name] = counted
                elif counted is not None:
                    sums[name] += counted
        return total, sums

    def _tell(self, told: Mapping[str, Any], loss: float, examples: int, losses: list[Sums]) -> None:
        """Add the metrics of a piece, and its loss if that is not a mean over its examples."""
        own = told.get("loss")
        losses.append(own or Sums(Metric(), [loss * examples, examples]))
        self._metrics.add({name: sums for name, sums in told.items() if name != "loss"}, examples)
        if own is not None or "loss" in self._metrics.sums:
            metric = own.metric if own is not None else self._metrics.sums["loss"].metric
            self._metrics.sums["loss"] = Sums(metric, sum(one.values for one in losses))

    @property
    def added_metrics(self) -> Mapping[str, Metric]:
        """The wrapped model's metrics."""
        return self._model.added_metrics if isinstance(self._model, TellsMetrics) else {}

    def step_metrics(self) -> Mapping[str, Sums]:
        """Return the metrics of all pieces of the last batch; empty if the model has none."""
        return self._metrics.sums

    def _placed(self, piece: Batch, keys: Mapping[str, Keys], xp: Any) -> Batch:
        """Return a piece with its whole batch's keys, and the places of its own keys' rows among them."""
        on_host = replace(piece, inputs=map_leaves(host_array, piece.inputs))
        places = placed(self._model, on_host, keys, keys).places
        return replace(piece, keys=keys, places={name: xp.asarray(place) for name, place in places.items()})


def _share_of_rows(piece: Batch, whole: Batch) -> float:
    """Return the factor of a piece's loss in that of the whole, if the loss is a mean over examples."""
    return rows_of(piece.inputs) / rows_of(whole.inputs)


def _piece(batch: Batch, part: int, rows: slice | Indices) -> Batch:
    return replace(batch.cut(rows), part=part, share=1.0, keys={}, places={}, on_host=None)


# --- whether loss and metrics are means ---


class Splitting(NamedTuple):
    """How examples are split."""

    several_batches: bool  # whether an evaluation has several batches
    pieces: int = 1  # pieces of a step
    round_steps: int = 1  # steps of a round whose mean is taken
    batch_parts: int = 1  # parts of a batch that several workers share


def needs_means(model: Model, parts: Splitting) -> bool:
    """Tell whether a model's loss, metrics or gradients are combined as means over examples."""
    if not isinstance(model, FrameworkModel) or not getattr(model, "tells_means", True):
        return False
    by_function = any(isinstance(metric, Mean) for metric in getattr(model, "_metrics", {}).values())
    return by_function or parts.several_batches or max(parts.pieces, parts.round_steps, parts.batch_parts) > 1


def check_means(
    model: Model, values: Mapping[str, Float32s], keys: Mapping[str, Keys], batch: Batch, parts: Splitting
) -> bool:
    """Warn of a loss and refuse a metric that is no mean over examples; return whether losses of parts combine."""
    rows = min(EXAMPLES_TRIED, rows_of(batch.inputs))
    found = _non_mean_figures(model, values, keys, batch, rows)
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
    if parts.several_batches and loss:
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
    """Tell whether a model needs no compilation, so that trying a step is cheap."""
    return not isinstance(model, FrameworkModel) or hasattr(model, "counts_rows")


def shares_batches(model: Model, values: Mapping[str, Float32s], keys: Mapping[str, Keys], batch: Batch) -> bool:
    """Tell whether a batch's loss is the mean of its halves' losses, as far as known without compiling the model."""
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


def _non_mean_figures(
    model: Model, values: Mapping[str, Float32s], keys: Mapping[str, Keys], batch: Batch, rows: int
) -> dict[str, tuple[float, float]]:
    """Return the figures that are no means over examples; empty if halves of a batch cannot be computed."""
    for order in (_by_target(batch.targets, rows), np.arange(rows)) if rows > 1 else ():
        with suppress(Exception), np.errstate(all="ignore"):  # for example, a metric that is undefined for one class
            return figures_not_means(lambda part: model.evaluate(values, _part(model, keys, batch, part), np), order)
    return {}


def _by_target(targets: Any, rows: int) -> Indices:
    """Return the examples' order by target, so that halves of a batch have different classes."""
    first = leaves(targets)[0][1][:rows]
    return np.argsort(first.reshape(rows, -1).sum(axis=1, dtype=np.float64), kind="stable")


def _part(model: Model, keys: Mapping[str, Keys], batch: Batch, part: Indices) -> Batch:
    some = replace(_piece(batch, 0, part), indices=part)
    return placed(model, some, keys, keys) if keys else some
