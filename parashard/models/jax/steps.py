"""A step of JAX on a GPU: one compiled function, from one run of variables to one vector of all results.

One array crosses in and one out by DLPack, which orders the streams of CuPy and JAX by events; nothing waits for the
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parashard.data.base import Array
from parashard.models.framework import FROZEN, pushed_floats
from parashard.models.jax.arrays import borrowed, jax
from parashard.plan.flat import FlatLayout, GradientRun
from parashard.plan.state import AVERAGE, COUNTER, COUNTER_BYTES, average_factor

Forms = Mapping[str, tuple[tuple[int, ...], Any]]
"""Shape and type of each leaf."""


class FlatStep:
    """A step over runs of one layout.

    The function returns one vector: gradients and counters in the places of their variables, zeros in those of others;
    then averages and sums before the step and after it; then the loss. CuPy computes the arrays to push for averages,
    because XLA's division differs in bits from the host's.
    """

    # plain, scaled: functions of trained leaves, rows, other leaves, (scale,) inputs, targets and seed for
    # `jax.value_and_grad(has_aux=True)`: the loss, or the loss times a scale, and (loss, new values of state).

    def __init__(
        self, layout: FlatLayout, forms: Forms, kinds: Mapping[str, str], plain: Callable[..., Any],
        scaled: Callable[..., Any],
    ) -> None:  # fmt: skip
        self.layout = layout
        self._forms, self._kinds = forms, kinds
        self._plain = jax.value_and_grad(plain, argnums=(0, 1), has_aux=True)
        self._scaled = jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True)
        averages = [name for name in forms if kinds[name].startswith(AVERAGE)]
        self._floats = [*averages, *(n for n in forms if kinds[n] not in ("", FROZEN, COUNTER) and n not in averages)]
        sizes = [math.prod(forms[name][0]) for name in averages]
        self._factors = np.repeat(np.array([average_factor(kinds[name]) for name in averages], np.float32), sizes)
        places = [np.arange(place.start, place.stop) for place, _ in (layout.places[name] for name in self._floats)]
        self._places = np.concatenate([np.empty(0, np.int64), *places])
        self._on_device: tuple[Array, Array] | None = None  # places and factors
        self._compiled = jax.jit(self._computed)

    def __call__(
        self, run: Array, rows: Mapping[str, Any], scale: float | None, data: tuple[Any, ...], weights: Any, xp: Any
    ) -> tuple[Array, GradientRun, Mapping[str, Any]]:
        """Return the loss, the run to push (gradients and state), and the gradients of rows as JAX arrays."""
        # scale: factor of the loss, and divisor of the gradients; None: no scaling.
        vector, of_rows = self._compiled(borrowed(run), rows, scale, data, weights)
        vector = xp.from_dlpack(vector)
        elements, floats = self.layout.elements, len(self._places)
        run, state, loss = vector[:elements], vector[elements:-1].reshape(2, floats), vector[-1:].reshape(())
        if floats:
            if self._on_device is None:
                self._on_device = xp.asarray(self._places), xp.asarray(self._factors)
            places, factors = self._on_device
            run[places] = pushed_floats(state[0], state[1], factors)
        due = [name for name, kind in self._kinds.items() if kind != FROZEN]
        return loss, GradientRun(self.layout, run, due, due), of_rows

    def _computed(
        self, run: Any, rows: dict[str, Any], scale: Any, data: tuple[Any, ...], weights: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        leaves = {name: self._leaf(name, run[self.layout.places[name][0]]) for name in self._forms}
        trained = {name: leaf for name, leaf in leaves.items() if not self._kinds[name]}
        state = {name: leaf for name, leaf in leaves.items() if name not in trained}
        if scale is None:
            (loss, after), gradients = self._plain(trained, rows, state, *data, **weights)
        else:
            (_, (loss, after)), gradients = self._scaled(trained, rows, state, scale, *data, **weights)
        pieces, of_rows = (
            {name: _float(leaf) if scale is None else _float(leaf) / scale for name, leaf in some.items()}
            for some in gradients
        )
        after = {**state, **after}
        pieces |= {name: _bytes_of(state[name], after[name]) for name in state if self._kinds[name] == COUNTER}
        parts, end = [], 0
        for name, (place, _) in self.layout.places.items():
            if name in pieces:
                parts += [jax.numpy.zeros(place.start - end, np.float32), pieces[name].reshape(-1)]
                end = place.stop
        parts.append(jax.numpy.zeros(self.layout.elements - end, np.float32))
        parts += [_float(of[name]).reshape(-1) for of in (state, after) for name in self._floats]
        return jax.numpy.concatenate([*parts, _float(loss).reshape(1)]), of_rows

    def _leaf(self, name: str, values: Any) -> Any:
        shape, dtype = self._forms[name]
        if self._kinds[name] == COUNTER:
            word, used = _word_of(dtype)
            rows = values.reshape(-1, COUNTER_BYTES)[:, :used].astype(word)
            values = (rows << _shifts(word, used)).sum(-1, dtype=word)
        return values.reshape(shape).astype(dtype)


def _word_of(dtype: Any) -> tuple[Any, int]:
    """Return the unsigned type in which a counter of this type is computed, modulo its size, and its bytes."""
    return (jax.numpy.uint64, 8) if dtype.itemsize == COUNTER_BYTES else (jax.numpy.uint32, 4)


def _shifts(word: Any, used: int) -> Any:
    return jax.numpy.arange(0, 8 * used, 8, dtype=word)


def _bytes_of(before: Any, after: Any) -> Any:
    """Return a difference of counters as `counter_rows` has it: of fewer than 64 bits, the upper bytes are its sign."""
    before, after = before.reshape(-1), after.reshape(-1)
    word, used = _word_of(before.dtype)
    low = (after.astype(word) - before.astype(word))[:, None] >> _shifts(word, used) & 0xFF
    sign = jax.numpy.where(after < before, 0xFF, 0)[:, None].astype(word)
    high = jax.numpy.broadcast_to(sign, (len(before), COUNTER_BYTES - used))
    return jax.numpy.concatenate([low, high], 1).astype(np.float32)


def _float(leaf: Any) -> Any:
    return leaf.astype(np.float32)
