"""The update rules as loops, compiled by Numba: one pass over memory, the GIL released.

Of the shard's modules only this one imports Numba. Each loop has the bits of the function of its name in
`parashard_server.state.kernels.reference`; its scalars come rounded to float32 from
`parashard_server.state.kernels.fused`, its only caller.

No fastmath and no `parallel=True`: they let results depend on the division of a vector. Scalars enter the loops as
np.float32, for a Python float would turn a whole expression into float64 and halve the vector width. Loops index: LLVM
does not vectorise Numba's iteration over an array. Compilation is at the first call per kind of argument (a read-only
gradient is a kind of its own); the machine code is cached on disk, per CPU model. The cache sees changes of this file
only, so that a constant of another module must come in as an argument.
"""

# The loops take what Numba infers, by position: it resolves keywords in Python, and slowly.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

_f32 = np.float32
_LARGEST = np.finfo(np.float32).max
_FINITE_BLOCK_ELEMENTS = 1 << 14  # is_finite stops at the end of the first block with a bad element


def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, error_model="numpy")(loop)
    return compiled


@_compiled
def _prepared(gradient, weight, weight_decay, clip, scale):
    return min(max(gradient * scale, -clip), clip) + weight_decay * weight


@_compiled
def sgd(weights, gradient, learning_rate, weight_decay, clip, scale):
    for i in range(weights.size):
        weights[i] -= learning_rate * _prepared(gradient[i], weights[i], weight_decay, clip, scale)


@_compiled
def momentum(weights, gradient, velocity, learning_rate, mu, weight_decay, clip, scale):
    for i in range(weights.size):
        b = mu * velocity[i] + _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        velocity[i] = b
        weights[i] -= learning_rate * b


@_compiled
def nesterov(weights, gradient, velocity, learning_rate, mu, weight_decay, clip, scale):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        b = mu * velocity[i] + g
        velocity[i] = b
        weights[i] -= learning_rate * (g + mu * b)


@_compiled
def adagrad(weights, gradient, accumulator, learning_rate, epsilon, weight_decay, clip, scale):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        a = accumulator[i] + g * g
        accumulator[i] = a
        weights[i] -= learning_rate * g / (np.sqrt(a) + epsilon)


@_compiled
def rmsprop(weights, gradient, mean_square, learning_rate, rho, one_minus_rho, epsilon, weight_decay, clip, scale):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        s = rho * mean_square[i] + one_minus_rho * g * g
        mean_square[i] = s
        weights[i] -= learning_rate * g / (np.sqrt(s) + epsilon)


@_compiled
def adam(
    weights, gradient, m, v, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, weight_decay, clip,
    scale,
):  # fmt: skip
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        m_i = beta1 * m[i] + one_minus_beta1 * g
        v_i = beta2 * v[i] + one_minus_beta2 * g * g
        m[i] = m_i
        v[i] = v_i
        weights[i] -= step_size * m_i / (np.sqrt(v_i) + epsilon)


@_compiled
def adamw(
    weights, gradient, m, v, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, shrink, clip, scale
):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], _f32(0.0), clip, scale)
        m_i = beta1 * m[i] + one_minus_beta1 * g
        v_i = beta2 * v[i] + one_minus_beta2 * g * g
        m[i] = m_i
        v[i] = v_i
        weights[i] -= step_size * m_i / (np.sqrt(v_i) + epsilon) + shrink * weights[i]


@_compiled
def ftrl(weights, gradient, z, n, reciprocal, beta, l1, l2, weight_decay, clip, scale):
    zero = _f32(0.0)
    for i in range(weights.size):
        w = weights[i]
        g = _prepared(gradient[i], w, weight_decay, clip, scale)
        n_i = n[i] + g * g
        root = np.sqrt(n_i)
        z_i = z[i] + (g - (root - np.sqrt(n[i])) * reciprocal * w)
        n[i] = n_i
        z[i] = z_i
        shrunk = z_i - l1 if z_i > l1 else (z_i + l1 if z_i < -l1 else zero)
        weights[i] = (zero - shrunk) / ((beta + root) * reciprocal + l2)


@_compiled
def _lamb_direction(m, v, weight, correction, epsilon, weight_decay):
    return correction * m / (np.sqrt(v) + epsilon) + weight_decay * weight


@_compiled
def lamb_moments(
    weights, gradient, m, v, beta1, one_minus_beta1, beta2, one_minus_beta2, correction, epsilon, weight_decay, clip,
    scale, block_elements,
):  # fmt: skip
    """Update m and v; return the squared norms of weights and direction, block by block: shape (blocks, 2)."""
    squares = np.zeros((-(-weights.size // block_elements), 2))
    direction = np.empty(block_elements, np.float32)
    for block in range(squares.shape[0]):
        run = slice(block * block_elements, (block + 1) * block_elements)
        w, g, m_run, v_run = weights[run], gradient[run], m[run], v[run]
        for i in range(w.size):
            g_i = _prepared(g[i], w[i], _f32(0.0), clip, scale)
            m_i = beta1 * m_run[i] + one_minus_beta1 * g_i
            v_i = beta2 * v_run[i] + one_minus_beta2 * g_i * g_i
            m_run[i] = m_i
            v_run[i] = v_i
            direction[i] = _lamb_direction(m_i, v_i, w[i], correction, epsilon, weight_decay)
        of_weights = of_direction = 0.0
        for i in range(w.size):  # apart, since a sum in index order cannot be vectorised
            of_weights += np.float64(w[i]) * np.float64(w[i])
            of_direction += np.float64(direction[i]) * np.float64(direction[i])
        squares[block] = of_weights, of_direction
    return squares


@_compiled
def lamb_step(weights, m, v, correction, epsilon, weight_decay, rate):
    for i in range(weights.size):  # the direction again, rather than a scratch vector of the variable's size
        weights[i] -= rate * _lamb_direction(m[i], v[i], weights[i], correction, epsilon, weight_decay)


@_compiled
def accumulate(total, gradient):
    for i in range(total.size):
        total[i] += gradient[i]


@_compiled
def delay_compensated(gradient, weights, pulled, strength):
    for i in range(gradient.size):
        gradient[i] += strength * gradient[i] * gradient[i] * (weights[i] - pulled[i])


@_compiled
def is_finite(array):
    for begin in range(0, array.size, _FINITE_BLOCK_ELEMENTS):
        block = array[begin : begin + _FINITE_BLOCK_ELEMENTS]
        finite = True
        for i in range(block.size):  # without an exit, hence vectorised; NaN compares as false
            finite &= abs(block[i]) <= _LARGEST
        if not finite:
            return False
    return True


@_compiled
def copy(destination, source):
    for i in range(destination.size):
        destination[i] = source[i]
