"""Shared by the models of all frameworks: step seeds, global random generators, loss scaling, state, loss weights."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from parashard.data.base import Array
from parashard.errors import ConfigurationError, WrongModel, shortened
from parashard.models.base import Initial
from parashard.models.user_errors import named_with_line
from parashard.plan.flat import FlatArrays, FlatLayout, GradientRun
from parashard.plan.state import ALLOWED, AVERAGE, COUNTER, average_factor, check_state, counter_rows, counter_values
from parashard.plan.variables import Float32s, Variable

Computed = tuple[float | Array, Mapping[str, Array | None]]
"""A loss and gradients by name."""
NOT_IN_PLACE = "the shards move it, and would not learn of that; compute with a changed copy, such as weight * factor"
LOSS_SCALE = 2.0**15
"""First scale of a float16 loss: the largest power of two that float16 has."""


def refuse_other_framework(given: Any, own: str) -> None:
    """Refuse a module of another framework than `own`: torch, keras or jax."""
    for name, kind, call in (("keras", "Model", "ps.keras.Model(model)"), ("torch", "nn", "ps.torch.Model(net, loss)")):
        base: Any = getattr(sys.modules.get(name), kind, None)
        base = getattr(base, "Module", base)
        if base is None or not (isinstance(given, base) or (isinstance(given, type) and issubclass(given, base))):
            continue
        if name != own:
            known = "PyTorch module" if name == "torch" else "Keras model"
            raise ConfigurationError(f"ps.{own}.Model was given a {known}: {call} takes it")
        return


def call_factory(make: Callable[[], Any], call: str) -> Any:
    """Call a user's factory; an unexpected error in it becomes a ConfigurationError that names `call`."""
    try:
        return make()
    except (ConfigurationError, WrongModel):
        raise
    except Exception as error:
        hint = ""
        if isinstance(error, TypeError) and "argument" in str(error) and call.endswith("()"):
            hint = "; what needs arguments is given as a function that gives them, such as lambda: Net(10)"
        raise ConfigurationError(f"{call} raised {named_with_line(error)}{hint}") from error


def step_seed(framework: str, seed: int, step: int, part: int = 0) -> int:
    """Return the 63-bit seed of a framework's generators for a step, or a part of one: a hash of all arguments."""
    piece = f"\0{part}" if part else ""
    digest = hashlib.sha256(f"parashard {framework}\0{seed}\0{step}{piece}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def unscaled(compute: Callable[[float], Computed], scale: float, xp: Any) -> Computed:
    """Return a step's loss and gradients, with loss scaling against underflow of float16 gradients."""
    # Gradients that are not finite are computed again with half the scale, down to 1. Each step begins with the same
    # scale, so that it is bit-identical wherever it is computed; powers of two change no bits that are representable.
    # `compute` takes the scale, and divides its gradients by it.
    found = compute(scale)
    while scale > 1 and not all(bool(xp.isfinite(g).all()) for g in _in_one(found[1]) if g is not None):
        scale /= 2
        found = compute(scale)
    return found


def _in_one(gradients: Mapping[str, Array | None]) -> list[Array | None]:
    """Return all gradients; those in one run as a single array."""
    if isinstance(gradients, GradientRun):
        return [gradients.run]
    if not isinstance(gradients, FlatArrays):
        return list(gradients.values())
    return [gradients.run, *(g for name, g in gradients.items() if name not in gradients.layout.places)]


def in_one_run(variables: Mapping[str, Array], names: Iterable[str], xp: Any) -> FlatArrays:
    """Return pulled arrays as `FlatArrays`; separate ones are copied into one run."""
    if isinstance(variables, FlatArrays):
        return variables
    layout = FlatLayout.of({name: Variable(name, tuple(variables[name].shape)) for name in names})
    flat = layout.over(xp.zeros(layout.elements, np.float32))
    for name, array in flat.items():
        array[...] = variables[name]
    return flat


def rows(array: Array) -> Array:
    """Return an array with at least one axis: a variable has rows."""
    return array if array.ndim else array.reshape(1)


def class_outside(targets: Any, classes: int) -> int | None:
    """Return a target outside of [0, classes), or None: JAX would accept it without an error."""
    low, high = (int(targets.min()), int(targets.max())) if targets.size else (0, 0)
    return low if low < 0 else high if high >= classes else None


CHECKS_MAX = 16
"""Maximum number of steps in which `Pairing` checks a loss; each check waits for a GPU."""


class Pairing:
    """Checks in a model's first steps whether a loss compares each output only with its own target.

    Outputs (n, 1) and targets (n,) broadcast to (n, n): such a loss compares each output with every target, and does
    not depend on the order of the targets. If the shapes leave no doubt, or all outputs or all targets are alike, it
    is not judged.
    """

    def __init__(self) -> None:
        self.is_open = True  # whether checks are still needed
        self._checks_left = CHECKS_MAX

    def is_doubtful(self, outputs: Any, targets: Any) -> bool:
        """Return whether to `check`, by the shapes of the two."""
        ours, theirs = getattr(outputs, "shape", None), getattr(targets, "shape", None)
        if ours is None or theirs is None or not self.is_open:
            return False
        alike = [side for side in ours if side != 1] == [side for side in theirs if side != 1]
        self.is_open = alike and tuple(ours) != tuple(theirs) and len(theirs) > 0 and theirs[0] > 1
        return self.is_open

    def check(self, outputs: Array, targets: Array, loss: float, reversed_loss: Callable[[], float]) -> None:
        """Refuse a loss that does not change when the targets are reversed."""
        self._checks_left -= 1
        self.is_open = self._checks_left > 0
        spread = float(np.ptp(outputs))
        told_apart = spread > 1e-3 * max(float(np.abs(outputs).max()), float(np.abs(targets).max()))
        if not told_apart or np.array_equal(targets, targets[::-1]):
            return
        if math.isclose(reversed_loss(), loss, rel_tol=4e-6):
            shape = tuple(outputs.shape)
            raise WrongModel(
                f"the loss compares each output with every target: outputs have shape {shape} and targets "
                f"{tuple(targets.shape)}, which broadcast to {np.broadcast_shapes(shape, targets.shape)}; give targets "
                f"of shape {shape}, or reshape the outputs in the loss"
            )
        self.is_open = False


FROZEN: Final = "frozen"


def checked_kind(name: str, kind: object, dtype: Any) -> str:
    """Return the kind of an array that has no gradient."""
    if kind != FROZEN and (not kind or check_state(kind) is not None):
        raise ConfigurationError(
            f"state: {name!r} is {shortened(repr(kind))}; allowed: {ALLOWED}, or {FROZEN} for what never changes"
        )
    whole = np.dtype(dtype).kind in "iu"
    if whole != (kind == COUNTER):
        raise ConfigurationError(
            f"state: {name!r} of {np.dtype(dtype)} is {kind!r}; allowed: counter for whole numbers, else the others"
        )
    return str(kind)


def initial_of(name: str, array: npt.NDArray[Any], kind: str) -> Initial:
    """Return the initial value of an array of a kind; "" is the kind of one with a gradient."""
    if kind == COUNTER:
        counted = counter_rows(array)
        return Variable(name, counted.shape, state=kind), counted
    content: Float32s = np.atleast_1d(np.asarray(array, np.float32))
    if not kind:
        return content
    return Variable(name, content.shape, frozen=kind == FROZEN, state="" if kind == FROZEN else kind), content


def host_array(value: Any) -> Any:
    """Return a value on the host: a copy of a CuPy array, any other value itself."""
    return value.get() if hasattr(value, "get") and hasattr(value, "dtype") else value


def value_of(pulled: Any, kind: str) -> Any:
    """Return a pulled variable in a framework's form: whole numbers for a counter, any other itself."""
    return counter_values(host_array(pulled)) if kind == COUNTER else pulled


def pushed_for(kind: str, before: npt.NDArray[Any], after: npt.NDArray[Any]) -> Float32s:
    """Return the array to push for state that a step changed."""
    # A running average changed by r' = r + M (b - r): the batch's own value is b = r + (r' - r) / M, and the shard
    # moves its r, which may be newer, towards it.
    if kind == COUNTER:
        return counter_rows(np.asarray(after, np.int64) - np.asarray(before, np.int64))
    before = np.atleast_1d(np.asarray(before, np.float32))
    moved: Float32s = moved_by(kind, before, np.atleast_1d(np.asarray(after, np.float32)))
    return moved


def moved_by(kind: str, before: Array, after: Array) -> Array:
    """Return the same as `pushed_for` for averages and sums: float32 arrays of NumPy or CuPy."""
    change = after - before
    return before + change / np.float32(average_factor(kind)) if kind.startswith(AVERAGE) else change


def pushed_floats(before: Any, after: Any, factors: Any) -> Any:
    """Return the same as `pushed_for`, bit-identical, for vectors of any framework."""
    # The first len(factors) elements belong to averages, the others to sums.
    change = after - before
    if len(factors) == len(before):
        return before + change / factors
    averages = slice(0, len(factors))
    change[averages] = before[averages] + change[averages] / factors
    return change


PARAMETER = "sample_weight"
"""Name of the parameter of a loss that applies weights itself."""

Weighted = Callable[[Any, Any, Any], Any]


def takes_weights(function: Any) -> bool:
    """Tell whether a function has a parameter for weights."""
    return PARAMETER in _parameters(function)


def weighted_loss(loss: Any) -> Weighted | None:
    """Return the loss as a function of outputs, targets and weights; None if it takes no weights."""
    # A loss with a parameter `sample_weight` is called with it. A loss with PyTorch's reduction="mean" is called with
    # "none", and the weighted mean is taken here. None: it has neither, or weights classes itself, which gives another
    # mean.
    if takes_weights(loss):
        return lambda outputs, targets, weights: loss(outputs, targets, **{PARAMETER: weights})
    bound = loss.keywords if isinstance(loss, functools.partial) else {}
    if getattr(loss, "weight", None) is not None or bound.get("weight") is not None:
        return None
    reduction = _parameters(loss).get("reduction")
    if reduction is not None and reduction.default == "mean":
        return lambda outputs, targets, weights: _mean(loss(outputs, targets, reduction="none"), weights)
    if getattr(loss, "reduction", None) == "mean":  # an object, such as torch.nn.MSELoss()
        each = copy.copy(loss)
        each.reduction = "none"
        return lambda outputs, targets, weights: _mean(each(outputs, targets), weights)
    return None


def _mean(values: Any, weights: Any) -> Any:
    """Return the mean of all losses, each multiplied by its example's weight."""
    if values.shape[:1] != weights.shape:
        raise WrongModel(
            f"the loss gives values of shape {tuple(values.shape)} for {len(weights)} weighted examples; due is one "
            "row for each"
        )
    return (values * weights.reshape(-1, *[1] * (len(values.shape) - 1)).to(values.dtype)).mean()


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


@contextmanager
def kept_generators(*, gpus: bool = True) -> Iterator[None]:
    """Restore the generators of Python, NumPy and, if imported, PyTorch on exit; with `gpus` also those of GPUs."""
    torch: Any = sys.modules.get("torch")
    pythons, numpys = random.getstate(), np.random.get_state()
    torchs = None if torch is None else torch.get_rng_state()
    in_use = gpus and torch is not None and torch.cuda.is_initialized()
    of_gpus = torch.cuda.get_rng_state_all() if in_use else None
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        if torchs is not None:
            torch.set_rng_state(torchs)
        if of_gpus is not None:
            torch.cuda.set_rng_state_all(of_gpus)


@contextmanager
def generators_seeded(seed: int) -> Iterator[None]:
    """Seed the process's generators within the `with` block: Python's, NumPy's and, if imported, PyTorch's."""
    torch: Any = sys.modules.get("torch")
    with kept_generators(gpus=False):  # a step's items are computed on the host
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if torch is not None:
            torch.default_generator.manual_seed(seed)
        yield
