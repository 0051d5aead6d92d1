"""Variables: named parameter arrays, and initial values that do not depend on which shard holds them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.errors import ConfigurationError, shortened
from parashard.plan.seeding import key_of, splitmix64
from parashard.plan.state import COUNTER, COUNTER_BYTES, check_state, counter_rows, counter_values

Float32s = npt.NDArray[np.float32]

_U64 = np.uint64
_INITIAL_BLOCK_ELEMENTS = 1 << 20  # bounds the float64 scratch of `initial_rows` to about 100 MiB


@dataclass(frozen=True)
class Initializer:
    """How the initial values of a variable are drawn.

    Parameters
    ----------
    kind : {"zeros", "constant", "uniform", "normal"}
        `uniform` draws from [-scale, scale); `normal` has mean 0 and standard deviation `scale`.
    scale : float
        The constant, the half width or the standard deviation; unused by `zeros`.
    """

    kind: str = "zeros"
    scale: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _DRAW:
            raise ConfigurationError(f"initializer {self.kind!r} is unknown; allowed: {', '.join(_DRAW)}")
        if not _is_finite(self.scale):
            raise ConfigurationError(f"initializer scale must be finite, found {self.scale!r}")


def glorot_uniform(fan_in: int, fan_out: int) -> Initializer:
    """Return the uniform initializer of Glorot and Bengio (AISTATS 2010, eq. 16)."""
    return Initializer("uniform", math.sqrt(6.0 / (fan_in + fan_out)))


def he_normal(fan_in: int) -> Initializer:
    """Return the normal initializer of He et al. (ICCV 2015, eq. 10) for ReLU networks."""
    return Initializer("normal", math.sqrt(2.0 / fan_in))


@dataclass(frozen=True)
class Variable:
    """A named float32 parameter array as a model declares it.

    Parameters
    ----------
    name : str
        Unique in the model, such as "dense_0.weight".
    shape : tuple of int
        At least one axis; the first one is the axis that partitions cut ("rows").
    initializer : Initializer
        How the initial values are drawn when no file gives them.
    frozen : bool
        True: never pushed, never changed.
    decay : bool
        False: weight decay leaves this variable alone (biases, usually).
    learning_rate_factor : float
        Multiplies the learning rate for this variable, >= 0.
    encoding : str
        Encoding of its gradients: float32, bfloat16, float16, int8 or topk:FRACTION. When a plan is made,
        `parashard.encodings.encoding.Encoding` checks it.
    state : str
        "": it has a gradient. Else it is state without one (`parashard.plan.state.check_state`): "average:M", "counter"
        or "sum". A push carries the value that its kind defines, as float32; optimizer, decay, clipping and encodings
        do not apply to it, and an empty push leaves it unchanged. A counter's last axis has `COUNTER_BYTES`.
    """

    name: str
    shape: tuple[int, ...]
    initializer: Initializer = field(default_factory=Initializer)
    frozen: bool = False
    decay: bool = True
    learning_rate_factor: float = 1.0
    encoding: str = "float32"
    state: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 1 <= len(self.name) <= 200:
            found = shortened(repr(self.name))
            raise ConfigurationError(f"a variable's name must be text of 1 to 200 characters, found {found}")
        object.__setattr__(self, "shape", self._checked_shape())
        if not isinstance(self.initializer, Initializer):
            raise self._wrong("initializer", "an Initializer, such as glorot_uniform(fan_in, fan_out)")
        for flag in ("frozen", "decay"):
            if not isinstance(getattr(self, flag), bool):
                raise self._wrong(flag, "True or False")
        if not isinstance(self.encoding, str):
            raise self._wrong("encoding", "text")
        if not (_is_finite(self.learning_rate_factor) and self.learning_rate_factor >= 0):
            raise self._wrong("learning_rate_factor", "finite and >= 0")
        object.__setattr__(self, "learning_rate_factor", abs(self.learning_rate_factor))  # -0.0 is 0.0
        why = check_state(self.state)
        if why is None and self.state == COUNTER and (len(self.shape) < 2 or self.shape[-1] != COUNTER_BYTES):
            why = f"a counter's shape ends with {COUNTER_BYTES}, its bytes; found {self.shape}"
        if why is None and self.state and self.encoding != "float32":
            why = f"state without a gradient travels as float32, found {shortened(self.encoding)}"
        if why is not None:
            raise ConfigurationError(f"variable {self.name!r}: {why}")

    def _checked_shape(self) -> tuple[int, ...]:
        """Return the shape as a tuple of Python's integers; it may be given as any list or tuple of integers."""
        axes = self.shape if isinstance(self.shape, list | tuple) else ()
        whole = [n for n in axes if isinstance(n, int | np.integer) and not isinstance(n, bool)]
        if not axes or len(whole) != len(axes) or any(n < 1 for n in whole):
            raise ConfigurationError(
                f"variable {self.name!r}: shape must be a tuple of whole numbers, of which every axis must be at least "
                f"1 and there must be one, found {shortened(repr(self.shape))}"
            )
        return tuple(int(n) for n in whole)

    def _wrong(self, what: str, allowed: str) -> ConfigurationError:
        found = shortened(repr(getattr(self, what)))
        return ConfigurationError(f"variable {self.name!r}: {what} must be {allowed}, found {found}")

    @property
    def rows(self) -> int:
        """Length of the first axis."""
        return self.shape[0]

    @property
    def row_elements(self) -> int:
        """Elements in one row."""
        return math.prod(self.shape[1:])

    @property
    def elements(self) -> int:
        """Elements in all rows."""
        return self.rows * self.row_elements


def in_name_order(variables: Mapping[str, Variable]) -> list[Variable]:
    """Return the variables sorted by name: the order of digests, plans and files."""
    return [variables[name] for name in sorted(variables)]


def initial_rows(variable: Variable, seed: int, row_start: int, row_stop: int) -> Float32s:
    """Return new initial values of rows [row_start, row_stop) of a variable, float32.

    Element e of the variable (row-major) is a function of (seed, name, e) alone, made of integer mixing, additions
    and one rounding: any partitioning, on any CPU, gives the same bits.
    """
    first, last = row_start * variable.row_elements, row_stop * variable.row_elements
    values = np.empty(last - first, np.float32)
    key = key_of(f"parashard initial values\0{seed}\0{variable.name}")
    for begin in range(first, last, _INITIAL_BLOCK_ELEMENTS):
        end = min(begin + _INITIAL_BLOCK_ELEMENTS, last)
        values[begin - first : end - first] = drawn(variable.initializer, key, np.arange(begin, end, dtype=_U64))
    return values.reshape(row_stop - row_start, *variable.shape[1:])


def values_sha256(variables: Mapping[str, Float32s]) -> str:
    """Return SHA-256 (hex) over the float32 little-endian values of all variables, in name order."""
    digest = hashlib.sha256()
    for name in sorted(variables):
        digest.update(np.ascontiguousarray(variables[name], "<f4").tobytes())
    return digest.hexdigest()


def as_exported(values: Mapping[str, Float32s], variables: Mapping[str, Variable]) -> dict[str, npt.NDArray[Any]]:
    """Convert values for a file that other programs read: counters become int64."""
    return {
        name: counter_values(value) if variables[name].state == COUNTER else value for name, value in values.items()
    }


def as_imported(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Float32s]:
    """Convert arrays of `as_exported` back to values."""
    return {name: counter_rows(array) if array.dtype == np.int64 else array for name, array in arrays.items()}


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def drawn(initializer: Initializer, key: int, counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return an initializer's values at counters under a key, in the counters' shape; the counters are only read."""
    return _DRAW[initializer.kind](key, counters, initializer.scale)


def _mixed(key: int, counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words: npt.NDArray[np.uint64] = splitmix64(counters.copy(), key)
    return words


def _uniform(key: int, counters: npt.NDArray[np.uint64], scale: float) -> npt.NDArray[np.float64]:
    unit = (_mixed(key, counters) >> _U64(11)).astype(np.float64) * 2.0**-53  # exact, in [0, 1)
    return (2.0 * unit - 1.0) * scale


def _normal(key: int, counters: npt.NDArray[np.uint64], scale: float) -> npt.NDArray[np.float64]:
    """Sum twelve 16-bit uniforms (Irwin-Hall): mean 0, variance 1, no transcendental function whose bits vary."""
    total = np.zeros(counters.shape)
    for lane in range(3):
        bits = _mixed(key ^ (0xA5A5A5A5 << (8 * lane + 1)) & 0xFFFFFFFFFFFFFFFF, counters)
        for shift in (0, 16, 32, 48):
            total += ((bits >> _U64(shift)) & _U64(0xFFFF)).astype(np.float64)
    return ((total + 6.0) * 2.0**-16 - 6.0) * scale  # each lane is centred: (k + 1/2) / 2^16


_Draw = Callable[[int, npt.NDArray[np.uint64], float], npt.NDArray[np.float64]]
_DRAW: dict[str, _Draw] = {
    "zeros": lambda key, counters, scale: np.zeros(counters.shape),
    "constant": lambda key, counters, scale: np.full(counters.shape, scale),
    "uniform": _uniform,
    "normal": _normal,
}


def global_norm(gradients: Mapping[str, Float32s]) -> float:
    """Return the Euclidean norm of all gradients together, in float64, in name order."""
    return norm_of(np.square(gradients[name], dtype=np.float64).sum() for name in sorted(gradients))


def norm_of(squares: Iterable[float]) -> float:
    """Return the norm of gradients from their squared norms, in name order."""
    total = 0.0
    for squared in squares:  # `sum` adds Python's floats, but not NumPy's, with a compensation from Python 3.12 on
        total += squared
    return math.sqrt(total)


Slots = Mapping[str, Mapping[str, Float32s]]
"""By slot and variable: arrays of the variable's shape."""
NO_SLOTS: Slots = MappingProxyType({})


def flat_slots(slots: Slots) -> dict[str, Float32s]:
    """Return the arrays by the names SLOT/VARIABLE."""
    return {
        f"{slot}/{variable}": np.ascontiguousarray(values)
        for slot, of_slot in sorted(slots.items())
        for variable, values in sorted(of_slot.items())
    }


def slots_sha256(slots: Slots) -> str:
    """Return SHA-256 (hex) over names and float32 little-endian values."""
    digest = hashlib.sha256()
    for name, values in flat_slots(slots).items():
        digest.update(f"{name}\0".encode())
        digest.update(np.ascontiguousarray(values, "<f4").data)
    return digest.hexdigest()
