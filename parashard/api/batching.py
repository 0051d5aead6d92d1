"""How many examples a step has, and its gradient in pieces.

Owns the meaning of `batch_size`, `global_batch_size` and `gradient_accumulation`. Called by `parashard.api.trainer` and
`parashard.api.trained_model`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from parashard.api.examples import Indexed
from parashard.data.base import Array, Batch, DataSource
from parashard.data.tree import map_leaves, rows_of
from parashard.errors import ConfigurationError
from parashard.metrics import Metric, Sums
from parashard.models.base import Initial, LooksUp, Model, TellsMetrics, adds_losses, for_thread
from parashard.models.declaration import parts_of
from parashard.models.evaluation import Totals
from parashard.models.framework import host_array
from parashard.models.looking_up import placed
from parashard.plan.embedding import Keys
from parashard.plan.state import COUNTER, SUM
from parashard.plan.steps import StepPlan

BATCH_SIZE = 32


def checked_size(name: str, size: int) -> int:
    """Return a number of examples, or of pieces; raise ConfigurationError if it is none."""
    if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
        raise ConfigurationError(f"{name} must be a whole number of at least 1, found {size!r}")
    return size


def examples_of_a_step(
    consistency: str,
    batch_size: int | None,
    global_batch_size: int | None,
    gradient_accumulation: int,
    own: int | None,
    *,
    batched: bool,
) -> int:
    """Return the batch size of a job.

    Raises ConfigurationError if these do not go together.

    Parameters
    ----------
    consistency : str
        In sync:N a round has N steps; else each step is a round of its own.
    batch_size : int, optional
        Examples whose gradient is computed at once.
    global_batch_size : int, optional
        Of a round, instead.
    gradient_accumulation : int
        Pieces of `batch_size` examples that a step has.
    own : int, optional
        What the data say themselves.
    batched : bool
        An index of the data is a batch: a step is one.
    """
    sizes = {
        "batch_size": batch_size,
        "global_batch_size": global_batch_size,
        "gradient_accumulation": gradient_accumulation,
    }
    for name, size in sizes.items():
        if size is not None:
            checked_size(name, size)
    if batch_size is not None and global_batch_size is not None:
        raise ConfigurationError("batch_size and global_batch_size: allowed is one of the two")
    if batched:
        if batch_size is not None or global_batch_size is not None:
            raise ConfigurationError("the items of these data are batches already, and each is one step: no batch_size")
        return 1
    if own is not None and batch_size not in (None, own):
        raise ConfigurationError(f"batch_size is {batch_size}, and the DataLoader's is {own}: say it once")
    if global_batch_size is None:
        return int(batch_size or own or BATCH_SIZE) * gradient_accumulation
    steps = int(consistency.partition(":")[2] or 1) if consistency.startswith("sync:") else 1
    if global_batch_size % (steps * gradient_accumulation):
        raise ConfigurationError(
            f"global_batch_size is {global_batch_size}, which {steps} steps of a round"
            f"{f' in {gradient_accumulation} pieces each' if gradient_accumulation > 1 else ''} do not divide"
        )
    return int(global_batch_size) // steps


def epochs_of_a_job(epochs: int, initial_epoch: int) -> dict[str, int]:
    """Return the keys of a job that trains the epochs from `initial_epoch` up to `epochs`; ConfigurationError: none."""
    if isinstance(initial_epoch, bool) or not hasattr(initial_epoch, "__index__") or initial_epoch < 0:
        raise ConfigurationError(f"initial_epoch must be a whole number of at least 0, found {initial_epoch!r}")
    checked_size("epochs", epochs)
    if not initial_epoch:
        return {"epochs": epochs}
    if epochs <= initial_epoch:
        raise ConfigurationError(f"initial_epoch is {initial_epoch} and epochs is {epochs}: there is none to train")
    return {"epochs": epochs - initial_epoch, "first_epoch": int(initial_epoch)}


def piece_size(examples: int, pieces: int) -> int:
    """Return how many examples a piece of a step has; the last piece may have fewer."""
    return -(-examples // pieces)


def order_of_a_job(
    steps_per_epoch: int | None, drop_last: bool | None, shuffle: bool, source: DataSource
) -> dict[str, Any]:
    """Return the keys of a job that say which examples its steps have; none of what is as by default.

    Raises ConfigurationError if one is not what it is allowed to be, or does not go with the data.
    """
    for name, value in (("drop_last", drop_last), ("shuffle", shuffle)):
        if value not in (True, False) and not (name == "drop_last" and value is None):
            raise ConfigurationError(f"{name} is True or False, found {value!r}")
    if drop_last and source.spec.batched:
        raise ConfigurationError(
            "drop_last: the items of these data are batches already; let the dataset be shorter by its last one"
        )
    if drop_last is None:
        drop_last = getattr(source, "drop_last", False)
    keys: dict[str, Any] = {}
    if steps_per_epoch is not None:
        keys["steps_per_epoch"] = int(checked_size("steps_per_epoch", steps_per_epoch))
    if drop_last:
        keys["drop_last"] = True
    if not shuffle:
        keys["shuffle"] = False
    return keys


def validation_examples(validation_steps: int | None, batch_size: int | None) -> Callable[[Indexed], int] | None:
    """Return how many of some examples so many batches have; None: all.

    A batch has as many examples as the data themselves say, else as one of the training.
    """
    if validation_steps is None:
        return None
    steps = checked_size("validation_steps", validation_steps)
    return lambda held_out: steps * (held_out.batch_size or batch_size or BATCH_SIZE)


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
        self._state = _state_of(model)
        self._share: Callable[[Batch, Batch], float] = getattr(model, "share", _share_of_rows)
        self._metrics = Totals()
        self.evaluate = model.evaluate
        self.adds_losses = adds_losses(model)
        self.share: Callable[[Batch, Batch], float] = self._share
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
            share, of_rows = self._share(piece, batch), _share_of_rows(piece, batch)
            total += float(loss) * share if share else 0.0  # where nothing counts the loss is NaN
            for name, gradient in gradients.items():
                state = self._state[name]
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


def _state_of(model: Model) -> Mapping[str, str]:
    """Return what kinds of state variables are; "" of one that has a gradient, and of a table."""
    variables = (parts_of(name, initial)[0] for name, initial in model.initial_variables().items())
    return defaultdict(str, {variable.name: variable.state for variable in variables})


def _cut(batch: Batch, part: int, rows: slice) -> Batch:
    inputs, targets = map_leaves(lambda array: array[rows], (batch.inputs, batch.targets))
    weights = None if batch.weights is None else batch.weights[rows]
    indices = batch.indices[rows] if len(batch.indices) == rows_of(batch.inputs) else batch.indices
    return Batch(batch.step, batch.epoch, indices, inputs, targets, weights, part)
