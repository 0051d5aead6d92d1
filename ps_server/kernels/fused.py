"""Update rules as one loop each, compiled by Numba: one pass over memory, the GIL released.

The public functions have the signatures and the meaning of `ps_server.kernels.reference`, which is to be read for both,
and give the same bits. This is the only module that imports Numba. Called by `ps_server.optimizer` and by the shard.

No fastmath and no `parallel=True`: they let results depend on where a vector is cut (P13). Scalars enter the loops as
np.float32, for a Python float would turn a whole expression into float64 and halve the vector width. Compilation is at
the first call per kind of argument (a read-only gradient is a kind of its own; see `Optimizer.warm_up`); the machine
code is cached on disk, per CPU model.
"""

# The loops take what Numba infers, by position: it resolves keywords in Python, and slowly.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from parashard.variables import Float32s
from ps_server.kernels.scalars import SMALLEST_FTRL_RATE, bias_corrected, trust_ratio

_f32 = np.float32
_u32 = np.uint32
_EXPONENT_BITS = _u32(0x7F800000)
_FINITE_BLOCK_ELEMENTS = 1 << 14  # is_finite stops at the end of the first block with a bad element


def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, error_model="numpy")(loop)
    return compiled


def sgd(
    weights: Float32s, gradient: Float32s, *, learning_rate: float, weight_decay: float, clip: float, scale: float
) -> None:
    """See `reference.sgd`."""
    _sgd(weights, gradient, _f32(learning_rate), _f32(weight_decay), _f32(clip), _f32(scale))


def momentum(
    weights: Float32s, gradient: Float32s, velocity: Float32s,
    *, learning_rate: float, momentum: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.momentum`."""
    _momentum(
        weights, gradient, velocity,
        _f32(learning_rate), _f32(momentum), _f32(weight_decay), _f32(clip), _f32(scale),
    )  # fmt: skip


def nesterov(
    weights: Float32s, gradient: Float32s, velocity: Float32s,
    *, learning_rate: float, momentum: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.nesterov`."""
    _nesterov(
        weights, gradient, velocity,
        _f32(learning_rate), _f32(momentum), _f32(weight_decay), _f32(clip), _f32(scale),
    )  # fmt: skip


def adagrad(
    weights: Float32s, gradient: Float32s, accumulator: Float32s,
    *, learning_rate: float, epsilon: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.adagrad`."""
    _adagrad(
        weights, gradient, accumulator,
        _f32(learning_rate), _f32(epsilon), _f32(weight_decay), _f32(clip), _f32(scale),
    )  # fmt: skip


def rmsprop(
    weights: Float32s, gradient: Float32s, mean_square: Float32s,
    *, learning_rate: float, rho: float, epsilon: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.rmsprop`."""
    _rmsprop(
        weights, gradient, mean_square,
        _f32(learning_rate), _f32(rho), _f32(1.0 - rho), _f32(epsilon), _f32(weight_decay), _f32(clip), _f32(scale),
    )  # fmt: skip


def adam(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """See `reference.adam`."""
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    _adam(
        weights, gradient, m, v,
        _f32(learning_rate * correction), _f32(beta1), _f32(1.0 - beta1), _f32(beta2), _f32(1.0 - beta2),
        _f32(epsilon_t), _f32(weight_decay), _f32(clip), _f32(scale),
    )  # fmt: skip


def adamw(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """See `reference.adamw`."""
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    _adamw(
        weights, gradient, m, v,
        _f32(learning_rate * correction), _f32(beta1), _f32(1.0 - beta1), _f32(beta2), _f32(1.0 - beta2),
        _f32(epsilon_t), _f32(learning_rate * weight_decay), _f32(clip), _f32(scale),
    )  # fmt: skip


def ftrl(
    weights: Float32s, gradient: Float32s, z: Float32s, n: Float32s,
    *, learning_rate: float, beta: float, l1: float, l2: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.ftrl`."""
    if learning_rate < SMALLEST_FTRL_RATE:
        return
    _ftrl(
        weights, gradient, z, n,
        _f32(1.0 / learning_rate), _f32(beta), _f32(l1), _f32(l2), _f32(weight_decay), _f32(clip), _f32(scale),
    )  # fmt: skip


def lamb(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """See `reference.lamb`."""
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    direction = (_f32(correction), _f32(epsilon_t), _f32(weight_decay))
    squares = _lamb_moments(
        weights, gradient, m, v,
        _f32(beta1), _f32(1.0 - beta1), _f32(beta2), _f32(1.0 - beta2), *direction, _f32(clip), _f32(scale),
    )  # fmt: skip
    _lamb_step(weights, m, v, *direction, _f32(learning_rate * trust_ratio(*squares)))


def accumulate(total: Float32s, gradient: Float32s) -> None:
    """See `reference.accumulate`."""
    _accumulate(total, gradient)


def delay_compensated(gradient: Float32s, weights: Float32s, pulled: Float32s, strength: float) -> None:
    """See `reference.delay_compensated`."""
    _delay_compensated(gradient, weights, pulled, _f32(strength))


def is_finite(array: Float32s) -> bool:
    """See `reference.is_finite`."""
    return bool(_is_finite(array))


@_compiled
def _prepared(gradient, weight, weight_decay, clip, scale):
    return min(max(gradient * scale, -clip), clip) + weight_decay * weight


@_compiled
def _sgd(weights, gradient, learning_rate, weight_decay, clip, scale):
    for i in range(weights.size):
        weights[i] -= learning_rate * _prepared(gradient[i], weights[i], weight_decay, clip, scale)


@_compiled
def _momentum(weights, gradient, velocity, learning_rate, mu, weight_decay, clip, scale):
    for i in range(weights.size):
        b = mu * velocity[i] + _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        velocity[i] = b
        weights[i] -= learning_rate * b


@_compiled
def _nesterov(weights, gradient, velocity, learning_rate, mu, weight_decay, clip, scale):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        b = mu * velocity[i] + g
        velocity[i] = b
        weights[i] -= learning_rate * (g + mu * b)


@_compiled
def _adagrad(weights, gradient, accumulator, learning_rate, epsilon, weight_decay, clip, scale):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        a = accumulator[i] + g * g
        accumulator[i] = a
        weights[i] -= learning_rate * g / (np.sqrt(a) + epsilon)


@_compiled
def _rmsprop(weights, gradient, mean_square, learning_rate, rho, one_minus_rho, epsilon, weight_decay, clip, scale):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        s = rho * mean_square[i] + one_minus_rho * g * g
        mean_square[i] = s
        weights[i] -= learning_rate * g / (np.sqrt(s) + epsilon)


@_compiled
def _adam(
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
def _adamw(
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
def _ftrl(weights, gradient, z, n, reciprocal, beta, l1, l2, weight_decay, clip, scale):
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
def _lamb_moments(
    weights, gradient, m, v, beta1, one_minus_beta1, beta2, one_minus_beta2, correction, epsilon, weight_decay, clip,
    scale,
):  # fmt: skip
    """Update m and v; return the squared norms of the weights and of the direction."""
    weights_squared = 0.0
    direction_squared = 0.0
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], _f32(0.0), clip, scale)
        m[i] = beta1 * m[i] + one_minus_beta1 * g
        v[i] = beta2 * v[i] + one_minus_beta2 * g * g
        w = np.float64(weights[i])
        u = np.float64(_lamb_direction(m[i], v[i], weights[i], correction, epsilon, weight_decay))
        weights_squared += w * w
        direction_squared += u * u
    return weights_squared, direction_squared


@_compiled
def _lamb_step(weights, m, v, correction, epsilon, weight_decay, rate):
    for i in range(weights.size):  # the direction again, rather than a scratch vector of the variable's size
        weights[i] -= rate * _lamb_direction(m[i], v[i], weights[i], correction, epsilon, weight_decay)


@_compiled
def _accumulate(total, gradient):
    for i in range(total.size):
        total[i] += gradient[i]


@_compiled
def _delay_compensated(gradient, weights, pulled, strength):
    for i in range(gradient.size):
        gradient[i] += strength * gradient[i] * gradient[i] * (weights[i] - pulled[i])


@_compiled
def _is_finite(array):
    bits = array.view(np.uint32)  # infinity and NaN are the numbers whose exponent bits are all set
    for begin in range(0, bits.size, _FINITE_BLOCK_ELEMENTS):
        largest = _u32(0)
        for element in bits[begin : begin + _FINITE_BLOCK_ELEMENTS]:  # without an exit, hence vectorised
            largest = max(largest, element & _EXPONENT_BITS)
        if largest == _EXPONENT_BITS:
            return False
    return True
