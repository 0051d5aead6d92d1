"""Task: a step's gradient and an evaluation's metrics, by the job's model on the worker's device.

Owns the transfer of batches and variables to the device and of gradients back, and every check of a model's results.
Knows neither leases nor shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from parashard.data.base import Array, BadExample, Batch, DataSource, examples_of
from parashard.data.tree import leaves, rows_of
from parashard.errors import ConfigurationError, NonFiniteGradient
from parashard.metrics import Sums
from parashard.models.base import Model, StepSignal, adds_losses
from parashard.models.evaluation import MetricPart, Totals, Update
from parashard.models.looking_up import keys_of_all, looked_up, placed
from parashard.models.user_errors import place_of
from parashard.plan.embedding import EmbeddingTable, Keys
from parashard.plan.flat import FlatArrays, GradientRun
from parashard.plan.partition import Plan
from parashard.plan.state import AVERAGE
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Float32s, Variable, global_norm
from parashard.protocol.messages import NO_KEYS
from parashard_worker.device import Device, Gpu, on_host
from parashard_worker.gpu_copies import Gradients, PendingGradients
from parashard_worker.gpu_norms import Scaling
from parashard_worker.round_weights import RoundWeights, UnevenBatches

EVALUATION_EXAMPLES = 1000  # held-out examples per evaluation batch
NOT_FLOATING_POINT = "biucOSUmM"  # kinds of dtypes: a cast to float32 would lose information or be meaningless
UNCONVERTIBLE = (TypeError, ValueError, OverflowError)  # raised by a failed conversion to a float or an array


class WrongResult(ConfigurationError):
    """The model returned an invalid loss, gradient or metric: a retry cannot succeed."""


class Task(NamedTuple):
    """A worker's task: the model, the data and the device."""

    model: Model
    source: DataSource
    steps: StepPlan
    plan: Plan
    device: Device
    clip_norm: float | None
    round_steps: int | None  # sync mode: N
    tables: Mapping[str, EmbeddingTable] = MappingProxyType({})  # embedding tables, by name
    variable_clip_norm: float | None = None
    weights: RoundWeights | None = None  # weights of steps in their rounds; None: all are 1
    tells_norm: bool = False  # each push includes the norm of its gradients; a GPU computes it

    def batch_of(self, step: int) -> Batch:
        """Read a step's examples into host memory, and look up the keys of the table rows that they need."""
        batch = read_step(self.model, self.source, self.steps, step)
        has_keys = self.tables and rows_of(batch.inputs)
        return looked_up(self.model, batch, self.tables) if has_keys else batch

    def held_out_keys(self) -> Mapping[str, Keys]:
        """Return the keys of the rows that all held-out examples need, by table."""
        return keys_of_all(self.model, self._held_out(), self.tables) if self.tables else {}

    def gradients(
        self, batch: Batch, values: Mapping[str, Float32s], meanwhile: Callable[[], Batch | None] = lambda: None
    ) -> tuple[float | None, int, Gradients | None]:
        """Compute a step: return its loss (None: the model returns none), number of examples and gradients.

        Gradients are finite float32, of every variable that is not frozen; all except state without a gradient are
        clipped to `clip_norm` together and weighted for their round or batch. They are empty for a step without
        examples; None: the step changes nothing. On a CPU they may be views of `values`, if the model returns such.
        A GPU checks, clips and weights gradients itself, and their copy to the host may still be pending; with rows of
        tables all this is done here. If the weights are on the GPU, in the process of their shard, the gradients stay
        there, in one run.

        `values`, which are only read, are every variable, and of each table the rows that the batch needs. `meanwhile`
        is called after the model has returned, and before the wait for its results. If it returns a batch, probably the
        next one, a GPU begins to copy it.

        Raises WrongResult if the model returns no loss, or not one gradient of each variable; NonFiniteGradient if a
        gradient has a value that is not finite, though the examples have none; BadExample if an example has one, too.
        """
        if not rows_of(batch.inputs):
            return None, 0, {}
        device = self.device
        variables = device.variables_from_host(values)
        there = device.batch_from_host(batch)
        returned = self.model.loss_and_gradients(variables, there, device.xp)
        if not isinstance(device, Gpu):
            meanwhile()
        raw_loss, raw = self._checked(returned)
        weight, clips = 1.0 if raw is None else self._weight(batch), (self.clip_norm, self.variable_clip_norm)
        scaling = Scaling(weight, *clips, self.tells_norm)
        _wait_for_jax(raw_loss, *({} if raw is None or isinstance(raw, GradientRun) else raw).values())
        told_loss = 0.0 if raw_loss is None else raw_loss
        trainable: Mapping[str, Array] = {}
        if isinstance(raw, GradientRun) and raw.is_of(self.plan.variables):
            trainable = raw
        elif raw is not None:
            trainable = self._trainable(raw, values)
        number: float
        gradients: Gradients
        finite: bool | None
        try:
            if trainable and isinstance(device, Gpu) and device.has(values):  # so it has their shard
                number, finite, gradients, _ = device.gathered(
                    told_loss, trainable, self.plan.variables, scaling, meanwhile=meanwhile
                )
            else:
                # With tables the host encodes: it has the residues of steps with rows.
                plan = None if self.tables else self.plan
                number, gradients, finite = device.to_host(
                    told_loss, trainable, self.plan.variables, scaling, plan, meanwhile
                )
        except UNCONVERTIBLE as error:
            raise self._wrong(f"returned what cannot be made float32: {error}") from error
        loss, rows = (None if raw_loss is None else number), rows_of(batch.inputs)
        if raw is None:
            return loss, rows, None
        if finite:
            return loss, rows, gradients
        assert not isinstance(gradients, PendingGradients), "they leave a GPU only if all are finite"
        arrived, step = on_host(gradients), batch.step - self.steps.steps_before
        try:
            if finite is None:
                return loss, rows, clip_and_weight(step, number, arrived, clips, self.plan.variables, weight)
            check_finite(step, number, arrived)
        except NonFiniteGradient:
            _check_examples(batch)
            raise
        return loss, rows, gradients

    def _weight(self, batch: Batch) -> float:
        """Return the weight of a step's gradient in its round or its batch."""
        if self.weights is None:
            return batch.share
        try:
            return self.weights.factor(batch.step - self.steps.steps_before, rows_of(batch.inputs))
        except UnevenBatches as error:
            raise WrongResult(error.message) from None

    def step_metrics(self, examples: int) -> dict[str, Sums]:
        """Return the metrics of the step whose gradients were computed last; empty if the model has none."""
        model: Any = self.model
        if not hasattr(model, "step_metrics") or not hasattr(model, "added_metrics"):  # isinstance is slow
            return {}
        totals = Totals()
        totals.add(self._checked_metrics(model.step_metrics(), "step_metrics"), examples)
        return totals.sums

    def metrics(
        self,
        values: Mapping[str, Float32s],
        computing: Callable[[], AbstractContextManager[None]],
        keys: Mapping[str, Keys] = NO_KEYS,
    ) -> dict[str, float]:
        """Evaluate values of the variables on all held-out examples; a metric that no example counts in is NaN."""
        # `values`, which are only read, are every variable, and of each table the rows of `keys`, which `held_out_keys`
        # has returned. `computing` is entered once per batch, around reading it and the model's evaluation. Raises
        # WrongResult unless the model returns a mapping of names to numbers.
        totals = Totals()
        variables = self.device.variables_from_host(values)
        batches = self._held_out()
        while True:
            with computing():
                batch = next(batches, None)
                if batch is None:
                    return totals.figures()
                there = placed(self.model, batch, self.tables, keys) if self.tables else batch
                metrics = self.model.evaluate(variables, self.device.batch_from_host(there), self.device.xp)
            totals.add(self._checked_metrics(metrics), rows_of(batch.inputs))

    def _held_out(self) -> Iterator[Batch]:
        spec = self.source.spec
        at_once = 1 if spec.batched else EVALUATION_EXAMPLES
        for start in range(0, spec.held_out, at_once):
            stop = min(spec.held_out, start + at_once)
            yield Batch(-1, -1, np.arange(start, stop), *self.source.held_out(start, stop))

    def _checked(self, result: object) -> tuple[Any, Mapping[str, Array | None] | None]:
        """Check that a model returned a loss and gradients, and return them."""
        due = "due is a loss and a mapping of gradients by variable"
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise self._wrong(f"returned {_in_words(result)}; {due}")
        loss, gradients = result
        if gradients is not StepSignal.NO_PUSH and not isinstance(gradients, Mapping):
            raise self._wrong(f"returned a loss and {_in_words(gradients)}; {due}")
        pushed = None if gradients is StepSignal.NO_PUSH else gradients
        if loss is StepSignal.NO_LOSS:
            return None, pushed
        if not _is_number(loss):
            raise self._wrong(f"returned {_in_words(loss)} as the loss; due is a number, the mean over the batch")
        return _scalar(loss), pushed

    def _checked_metrics(self, metrics: object, method: str = "evaluate") -> dict[str, MetricPart]:
        """Check that a model returned metrics, and return them as floats and states."""
        due = "due is a mapping of names to numbers, which are means over the batch"
        if not isinstance(metrics, Mapping):
            raise self._wrong(f"returned {_in_words(metrics)}; {due}", method)
        judged: dict[str, MetricPart] = {}
        for name, value in metrics.items():
            if not isinstance(name, str) or name != name.encode("utf-8", "replace").decode():
                raise self._wrong(f"returned {name!a} as a metric's name; due is text", method)
            if isinstance(value, Sums | Update):
                judged[name] = value
                continue
            if not _is_number(value):
                raise self._wrong(f"returned {_in_words(value)} for {name!r}; {due}", method)
            try:
                judged[name] = float(_scalar(value))
            except UNCONVERTIBLE as error:
                raise self._wrong(f"returned no float for {name!r}: {error}; {due}", method) from error
        return judged

    def _trainable(self, gradients: Mapping[str, Array | None], values: Mapping[str, Float32s]) -> Mapping[str, Array]:
        """Check a model's gradients against its variables and rows, and leave out None and those of frozen ones."""
        variables, rows = self.plan.variables, self._rows_due(values)
        if rows:
            variables = {**variables, **rows}
        for name, gradient in gradients.items():
            if name in self.tables and name not in rows:
                continue  # the batch has no key of it
            if name not in variables:
                known = ", ".join(sorted(variables))
                raise self._wrong(f"returned a gradient for {name!r}, which is none of its variables: {known}")
            if gradient is None:
                continue
            if not hasattr(gradient, "shape"):
                raise self._wrong(f"returned {_in_words(gradient)} for {name!r}; due is an array, or None for zeros")
            if tuple(gradient.shape) != variables[name].shape:
                raise self._wrong(
                    f"returned a gradient for {name!r} of shape {tuple(gradient.shape)}; the variable has "
                    f"{variables[name].shape}"
                )
            if not variables[name].frozen and not _is_floating(gradient):
                dtype = getattr(gradient, "dtype", None)
                raise self._wrong(f"returned a gradient for {name!r} of {dtype}; gradients are floating point")
        missing = [name for name in sorted(variables) if name not in gradients and not variables[name].frozen]
        if missing:
            raise self._wrong(
                f"returned no gradient for {missing[0]!r}; due is one for each variable: None where it "
                "does not count in this step, or frozen = true for a variable that is not trained"
            )
        found = {
            name: g
            for name, g in gradients.items()
            if g is not None and name in variables and not variables[name].frozen
        }
        for name in (gradients.keys() & variables.keys()) - found.keys():
            if variables[name].state and not variables[name].frozen:  # every push that is not empty must have it
                if variables[name].state.startswith(AVERAGE):
                    raise self._wrong(f"returned None for {name!r}; due is the batch's value: it is an average")
                found[name] = self.device.xp.zeros(variables[name].shape, np.float32)
        return _in_run(gradients, found)

    def _rows_due(self, values: Mapping[str, Float32s]) -> dict[str, Variable]:
        """Return the shape of the rows of each table of which the batch has a key, as a variable."""
        of_tables = {name: values[name].shape for name in self.tables if name in values}
        return {name: Variable(name, shape) for name, shape in of_tables.items() if shape[0]}

    def _wrong(self, what: str, method: str = "loss_and_gradients") -> WrongResult:
        return WrongResult(f"{place_of(getattr(self.model, method))}{method} {what}")


def _in_run(gradients: Mapping[str, Array | None], found: dict[str, Array]) -> dict[str, Array]:
    """Return some of a model's gradients, in the same run if the model's are in one."""
    if isinstance(gradients, FlatArrays | GradientRun):
        return FlatArrays(gradients.layout, gradients.run, found)
    return found


def read_step(model: Model, source: DataSource, steps: StepPlan, step: int) -> Batch:
    """Read the examples of a step: only its part of the batch if these determine its share, else the whole batch."""
    # If no example of a part counts, for instance because all its targets are ignored, the result is empty: its own
    # loss would divide by zero. The sum of share * gradient over a batch's parts is the gradient of the whole batch.
    number, epoch, indices = steps.steps_before + step, steps.epoch_of(step), steps.indices(step)
    if steps.parts == 1:
        return Batch(number, epoch, indices, *examples_of(source, number, indices))
    if not len(indices):
        return Batch(number, epoch, indices, np.empty((0, 1), np.float32), np.empty(0, np.float32))
    if not steps.batched:
        part = Batch(number, epoch, indices, *examples_of(source, number, indices))
        if counts_rows(model, part):
            return replace(part, share=1.0 if adds_losses(model) else steps.share(step))
    whole_indices = steps.indices_of_batch(step)
    drawn_by = number - step % steps.parts  # all parts of a batch must draw the same random numbers
    whole = Batch(number, epoch, whole_indices, *examples_of(source, drawn_by, whole_indices))
    part = whole.cut(steps.rows_of_part(step, rows_of(whole.inputs)))
    share = share_of(model, part, whole)
    return replace(part, share=share) if share > 0 else whole.cut(slice(0))  # NaN: no example of the batch counts


def counts_rows(model: Model, part: Batch) -> bool:
    """Tell whether a part's share depends only on its number of examples (or is 1), not on their values."""
    of_model = getattr(model, "counts_rows", None)
    return of_model is None or adds_losses(model) or bool(of_model(part))


def share_of(model: Model, part: Batch, whole: Batch) -> float:
    """Return the weight of a part's gradient in the gradient of its batch."""
    if not rows_of(part.inputs):
        return 0.0
    if adds_losses(model):
        return 1.0
    of_model = getattr(model, "share", None)
    return rows_of(part.inputs) / rows_of(whole.inputs) if of_model is None else float(of_model(part, whole))


def clip_and_weight(
    step: int,
    loss: float,
    gradients: Mapping[str, Float32s],
    clips: tuple[float | None, float | None],
    variables: Mapping[str, Variable],
    weight: float = 1.0,
) -> dict[str, Float32s]:
    """Return gradients that may be pushed: all finite (P6), clipped, and then times `weight`.

    `clips` are bounds of the norm of all gradients together, and of each variable's, which is clipped first. State
    without a gradient is neither clipped nor weighted, and not part of the norm.

    Raises NonFiniteGradient before anything is sent: a bad gradient must reach no shard.
    """
    together, each = clips
    check_finite(step, loss, gradients)
    scaled = {name: g for name, g in gradients.items() if name not in variables or not variables[name].state}
    if each is not None:
        scaled = {name: _clipped(g, each) for name, g in scaled.items()}
    norm = global_norm(scaled) if together is not None else 0.0
    if together is not None and norm > together:
        weight *= together / norm
    if weight != 1.0:
        factor = np.float32(weight)
        scaled = {name: gradient * factor for name, gradient in scaled.items()}
    return {**gradients, **scaled}


def check_finite(step: int, loss: float, gradients: Mapping[str, Float32s]) -> None:
    """Raise NonFiniteGradient if a gradient has a value that is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        bad = sorted(name for name, gradient in gradients.items() if not _is_finite(gradient))
    if bad:
        raise NonFiniteGradient(_not_finite(step, loss, bad[0], gradients[bad[0]]))


def _clipped(gradient: Float32s, bound: float) -> Float32s:
    norm = global_norm({"": gradient})
    return gradient * np.float32(bound / norm) if norm > bound else gradient


def _is_finite(gradient: Float32s) -> bool:
    """Tell whether all values are finite; a finite sum of squares proves it without a temporary array."""
    flat = gradient.ravel(order="K")
    return math.isfinite(np.vdot(flat, flat)) or bool(np.isfinite(flat).all())


def _check_examples(batch: Batch) -> None:
    indices, rows = batch.indices, rows_of(batch.inputs)
    arrays = leaves((batch.inputs, batch.targets, *([] if batch.weights is None else [batch.weights])))
    floating = [values for _, values in arrays if values.dtype.kind == "f"]
    for row in range(rows):
        if any(not np.isfinite(values[row]).all() for values in floating):
            what = f"example {indices[row]}" if rows == len(indices) else f"example {row} of batch {indices[0]}"
            raise BadExample(f"{what} of the data has a value that is not finite")


def _not_finite(step: int, loss: float, variable: str, gradient: Float32s) -> str:
    if not math.isfinite(loss):
        return f"loss became {'NaN' if math.isnan(loss) else 'infinite'} at step {step:,}"
    what = "NaN" if np.isnan(gradient).any() else "infinite"
    return f"the gradient of {variable!r} became {what} at step {step:,}, with a loss of {loss:.3g}"


def _is_number(value: object) -> bool:
    """Tell whether a value is one real number, without copying an array from a GPU."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")  # NumPy's and CuPy's dtypes have one
    return hasattr(value, "__float__") and math.prod(getattr(value, "shape", ())) == 1 and kind not in "cOSUmM"


def _scalar(number: Any) -> Any:
    """Reshape an array of one number to shape (), which NumPy requires for a conversion to float."""
    return number.reshape(()) if getattr(number, "shape", ()) else number


def _is_floating(array: object) -> bool:
    dtype = getattr(array, "dtype", None)
    return getattr(dtype, "kind", "f") not in NOT_FLOATING_POINT and getattr(dtype, "is_floating_point", True)


def _wait_for_jax(*values: Any) -> None:
    """Wait for arrays of JAX, so that errors while computing them count as the model's, not as failed conversions."""
    for value in values:
        if hasattr(value, "block_until_ready"):
            value.block_until_ready()


def _in_words(value: object) -> str:
    """Describe a value, such as "a list", "None" or "an array of int64 of shape (3,)"."""
    if value is None:
        return "None"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of {value.dtype} of shape {tuple(value.shape)}"
    noun = type(value).__name__
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
