"""Loops that apply the update rules to vectors, compiled by `parashard_server.state.kernels.compiling`.

A loop makes one pass over memory and calls a rule of `parashard_server.state.kernels.rules` for each element; its
scalars come rounded to float32 from `parashard_server.state.kernels.fused`. A loop that updates weights flushes
denormals: slots of elements without a gradient decay into them, and processors are several times slower on them.

No fastmath and no `parallel=True`: they let results depend on the division of a vector. Scalars are float32, for a
float64 would turn a whole expression into float64 and halve the vector width. Loops index: LLVM does not vectorise
Numba's iteration over an array. Machine code is cached by the text of all files of this folder: a constant of another
folder must be passed as an argument.
"""

# The loops take what Numba infers, by position: it resolves keywords in Python, and slowly.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np

from parashard.process.cached_code import const, inlined
from parashard_server.state.kernels import rules
from parashard_server.state.kernels.compiling import (
    SUMS,
    VECTOR,
    compiled_form_of,
    flush_denormals,
    loop,
    restore_mode,
)
from parashard_server.state.kernels.rules import RULES

_f32 = np.float32
_LARGEST = np.finfo(np.float32).max
_FINITE_BLOCK_ELEMENTS = 1 << 14  # is_finite stops at the end of the first block with a bad element


@compiled_form_of(rules.maximum)
def _maximum(a, b):
    return lambda a, b: max(a, b)  # noqa: PLW0108  # of Python: Numba refuses the builtin


@compiled_form_of(rules.minimum)
def _minimum(a, b):
    return lambda a, b: min(a, b)  # noqa: PLW0108


@compiled_form_of(rules.where)
def _where(condition, a, b):
    return lambda condition, a, b: a if condition else b


_prepared = inlined(rules.prepared)
_decayed = inlined(rules.decayed)
_rowwise_adagrad = inlined(RULES["rowwise_adagrad"].step)
_lamb_moments = inlined(RULES["lamb"].step)
_lamb_direction = inlined(rules.lamb_direction)

_DENSE = """
def {name}({arguments}):
    mode = flush_denormals()
    for i in range(weights.size):
        g = prepared(gradient[i], weights[i], weight_decay, clip, scale)
        {moved}, = step(weights[i], g, {slots_and_scalars})
    restore_mode(mode)
"""
_BY_ROW = """
def {name}({arguments}):
    mode = flush_denormals()
    for row in range({by_t}.size):
        length = weights.size // {by_t}.size
        for i in range(row * length, (row + 1) * length):
            g = prepared(gradient[i], weights[i], weight_decay, clip, scale)
            {moved}, = step(weights[i], g, {slots_and_scalars})
    restore_mode(mode)
"""


def _declare_loop(rule, *, by_row):
    """Declare the loop of a rule; `by_row`: scalars that depend on t are then vectors, with one for each row.

    Of `adam` it is

        def adam(weights, gradient, m, v, step_size, ..., epsilon_t, weight_decay, clip, scale):
            mode = flush_denormals()
            for i in range(weights.size):
                g = prepared(gradient[i], weights[i], weight_decay, clip, scale)
                weights[i], m[i], v[i], = step(weights[i], g, m[i], v[i], step_size, ..., epsilon_t)
            restore_mode(mode)
    """
    slots, scalars, by_t = RULES[rule].slots, RULES[rule].scalars, RULES[rule].by_t if by_row else ()
    name = f"{rule}_by_row" if by_row else rule
    shared = [scalar for scalar in scalars if scalar not in by_t]
    slots_at_i = [f"{slot}[i]" for slot in slots]
    text = (_BY_ROW if by_row else _DENSE).format(
        name=name,
        arguments=", ".join(["weights", "gradient", *slots, *by_t, *shared]),
        moved=", ".join(["weights[i]", *slots_at_i]),
        by_t=by_t[0] if by_t else "",
        slots_and_scalars=", ".join(
            [*slots_at_i, *(f"{one}[row]" if one in by_t else one for one in RULES[rule].of_step)]
        ),
    )
    made = {"__name__": __name__, "step": inlined(RULES[rule].step), "prepared": _prepared}
    made |= {"flush_denormals": flush_denormals, "restore_mode": restore_mode}
    exec(compile(text, __file__, "exec"), made)  # Numba needs functions with named arguments, and a file to cache them
    loop(VECTOR, const(VECTOR), *[VECTOR] * len(slots), *[const(VECTOR)] * len(by_t))(made[name])


for _rule in RULES:
    if _rule not in ("lamb", "rowwise_adagrad"):  # these sum before they update a weight: below
        _declare_loop(_rule, by_row=False)
for _rule in ("adam", "adamw"):
    _declare_loop(_rule, by_row=True)


@loop(VECTOR, const(VECTOR), VECTOR)
def rowwise_adagrad(weights, gradient, accumulator, learning_rate, epsilon, weight_decay, clip, scale):
    mode = flush_denormals()
    length = weights.size // max(accumulator.size, 1)
    for row in range(accumulator.size):
        begin, end = row * length, (row + 1) * length
        total = _f32(0.0)
        for i in range(begin, end):
            g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
            total += g * g
        before = after = accumulator[row]
        mean_square = total / _f32(length)
        for i in range(begin, end):
            g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
            weights[i], after = _rowwise_adagrad(weights[i], g, before, mean_square, learning_rate, epsilon)
        accumulator[row] = after
    restore_mode(mode)


@loop(const(VECTOR), const(VECTOR), VECTOR, VECTOR, SUMS, VECTOR)
def lamb_moments(
    weights, gradient, m, v, squares, direction, correction, epsilon_t, decay, beta1, one_minus_beta1, beta2,
    one_minus_beta2, weight_decay, clip, scale,
):  # fmt: skip
    """Update m and v; for each block of `direction.size` elements put two sums into `squares`."""
    # These are the squared norms of weights and direction; `squares` has 2 * blocks elements, `direction` is scratch.
    mode = flush_denormals()
    for block in range(squares.size // 2):
        run = slice(block * direction.size, (block + 1) * direction.size)
        w, g, m_run, v_run = weights[run], gradient[run], m[run], v[run]
        for i in range(w.size):
            g_i = _prepared(g[i], w[i], weight_decay, clip, scale)
            m_i, v_i = _lamb_moments(w[i], g_i, m_run[i], v_run[i], beta1, one_minus_beta1, beta2, one_minus_beta2)
            m_run[i], v_run[i] = m_i, v_i
            direction[i] = _lamb_direction(w[i], m_i, v_i, correction, epsilon_t, decay)
        of_weights = of_direction = 0.0
        for i in range(w.size):  # a separate loop, since a sum in index order cannot be vectorised
            of_weights += np.float64(w[i]) * np.float64(w[i])
            of_direction += np.float64(direction[i]) * np.float64(direction[i])
        squares[2 * block] = of_weights
        squares[2 * block + 1] = of_direction
    restore_mode(mode)


@loop(VECTOR, const(VECTOR), const(VECTOR))
def lamb_step(weights, m, v, correction, epsilon_t, decay, rate):
    mode = flush_denormals()
    for i in range(weights.size):  # computes the direction again, to need no vector of the variable's size
        weights[i] -= rate * _lamb_direction(weights[i], m[i], v[i], correction, epsilon_t, decay)
    restore_mode(mode)


@loop(VECTOR)
def decay(weights, share):
    mode = flush_denormals()
    for i in range(weights.size):
        weights[i] = _decayed(weights[i], share)
    restore_mode(mode)


@loop(VECTOR, const(VECTOR))
def accumulate(total, gradient):
    for i in range(total.size):
        total[i] += gradient[i]


@loop(const(VECTOR))
def is_finite(array):
    for begin in range(0, array.size, _FINITE_BLOCK_ELEMENTS):
        block = array[begin : begin + _FINITE_BLOCK_ELEMENTS]
        finite = True
        for i in range(block.size):  # without an exit, hence vectorised; NaN compares as false
            finite &= abs(block[i]) <= _LARGEST
        if not finite:
            return False
    return True
