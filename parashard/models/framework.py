"""What models of every framework share: a step's seed, a scaled loss, arrays with an axis.

Knows no framework. Called by `parashard.torch`, `parashard.jax` and `parashard.keras`.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.models.user_errors import named_with_line

Computed = tuple[float | Array, Mapping[str, Array | None]]
"""A loss and gradients by name."""
NOT_IN_PLACE = "the shards move it, and would not learn of that; compute with a changed copy, such as weight * factor"
LOSS_SCALE = 2.0**15
"""What a loss of float16 is multiplied by: the largest power of two that float16 has."""


class WrongModel(ValueError):
    """A model computes what no step can be made of. It is a failure of the step, as any other error in a model."""


def refuse_other_framework(given: Any, own: str) -> None:
    """Refuse a module of another framework than `own`: torch, keras or jax.

    Raises
    ------
    ConfigurationError
        It names the model that takes it.
    """
    for name, kind, call in (("keras", "Model", "ps.keras.Model(model)"), ("torch", "nn", "ps.torch.Model(net, loss)")):
        base: Any = getattr(sys.modules.get(name), kind, None)
        base = getattr(base, "Module", base)
        if base is None or not (isinstance(given, base) or (isinstance(given, type) and issubclass(given, base))):
            continue
        if name != own:
            known = "PyTorch module" if name == "torch" else "Keras model"
            raise ConfigurationError(f"ps.{own}.Model was given a {known}: {call} takes it")
        return


def made_by(make: Callable[[], Any], call: str) -> Any:
    """Return what a user's factory makes.

    Raises
    ------
    ConfigurationError
        If it raises; `call` says how it is called.
    """
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
    """Return what a framework's generators are seeded with before a step, or a part of one: 63 bits of all these."""
    piece = f"\0{part}" if part else ""
    digest = hashlib.sha256(f"parashard {framework}\0{seed}\0{step}{piece}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def unscaled(compute: Callable[[float], Computed], scale: float, xp: Any) -> Computed:
    """Return a step's loss and gradients, computed with a scaled loss where float16 has too few small numbers.

    A gradient that is not finite is computed again with half the scale, down to 1. Each step begins with the same
    scale, so that it has the same bits wherever it is computed; powers of two change none that are representable.

    Parameters
    ----------
    compute : callable (scale) -> (loss, gradients)
        The gradients of the loss times the scale, divided by it.
    scale : float
        A power of two; 1 where nothing is scaled.
    xp : module
        Of the gradients.
    """
    found = compute(scale)
    while scale > 1 and not all(bool(xp.isfinite(g).all()) for g in found[1].values() if g is not None):
        scale /= 2
        found = compute(scale)
    return found


def rows(array: Array) -> Array:
    """Return an array with at least one axis: a variable has rows."""
    return array if array.ndim else array.reshape(1)


def class_outside(targets: Any, classes: int) -> int | None:
    """Return a class number that outputs of so many classes have no place for, if there is one.

    JAX takes it without an error: the example adds nothing to the loss, or NaN, or -1 stands for the last class.
    """
    low, high = (int(targets.min()), int(targets.max())) if targets.size else (0, 0)
    return low if low < 0 else high if high >= classes else None


class Pairing:
    """Whether a loss pairs each output with its own target, which a model asks in its first steps.

    Outputs (n, 1) and targets (n,) broadcast to (n, n): such a loss compares each output with every target, and is the
    same in whatever order the targets come. Where shapes do not tell, or outputs or targets are all alike, nothing is
    said.
    """

    def __init__(self) -> None:
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether there is something to be asked yet."""
        return self._open

    def is_doubtful(self, outputs: Any, targets: Any) -> bool:
        """Return whether to `check`, by the shapes of the two."""
        ours, theirs = getattr(outputs, "shape", None), getattr(targets, "shape", None)
        if ours is None or theirs is None or not self._open:
            return False
        alike = [side for side in ours if side != 1] == [side for side in theirs if side != 1]
        self._open = alike and tuple(ours) != tuple(theirs) and len(theirs) > 0 and theirs[0] > 1
        return self._open

    def check(self, outputs: Array, targets: Array, loss: float, reversed_loss: Callable[[], float]) -> None:
        """Refuse a loss that is the same when the targets come in reverse.

        Parameters
        ----------
        outputs, targets : ndarray
            Of a batch.
        loss : float
            Of them.
        reversed_loss : callable
            Computes the loss of the same outputs and the targets from the last to the first.

        Raises
        ------
        WrongModel
            If it is the same to the last digits of float32.
        """
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
        self._open = False
