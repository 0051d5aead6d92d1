"""The update rules as loops, compiled by `parashard_server.state.kernels.compiling`.

A loop makes one pass over memory. It has the bits of the function of its
name in `parashard_server.state.kernels.reference`; its scalars come rounded to float32 from
`parashard_server.state.kernels.fused`.

No fastmath and no `parallel=True`: they let results depend on the division of a vector. Scalars are float32, for a
float64 would turn a whole expression into float64 and halve the vector width. Loops index: LLVM does not vectorise
Numba's iteration over an array. A loop takes no memory and raises nothing, for that would need Python. The machine code
is kept under the text of this file, so that a constant of another module must come in as an argument.
"""

# The loops take what Numba infers, by position: it resolves keywords in Python, and slowly.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np

from parashard_server.state.kernels.compiling import SUMS, VECTOR, inlined, loop

_f32 = np.float32
_LARGEST = np.finfo(np.float32).max
_FINITE_BLOCK_ELEMENTS = 1 << 14  # is_finite stops at the end of the first block with a bad element


@inlined
def _prepared(gradient, weight, weight_decay, clip, scale):
    return min(max(gradient * scale, -clip), clip) + weight_decay * weight


@loop(2)
def sgd(weights, gradient, learning_rate, weight_decay, clip, scale):
    for i in range(weights.size):
        weights[i] -= learning_rate * _prepared(gradient[i], weights[i], weight_decay, clip, scale)


@loop(3)
def momentum(weights, gradient, velocity, entering, moving, mu, weight_decay, clip, scale):
    for i in range(weights.size):
        b = mu * velocity[i] + entering * _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        velocity[i] = b
        weights[i] -= moving * b


@loop(3)
def nesterov(weights, gradient, velocity, entering, moving, mu, weight_decay, clip, scale):
    for i in range(weights.size):
        g = entering * _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        b = mu * velocity[i] + g
        velocity[i] = b
        weights[i] -= moving * (g + mu * b)


@loop(3)
def adagrad(weights, gradient, accumulator, learning_rate, epsilon, weight_decay, clip, scale):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        a = accumulator[i] + g * g
        accumulator[i] = a
        weights[i] -= learning_rate * g / (np.sqrt(a) + epsilon)


@loop(3)
def rmsprop(weights, gradient, mean_square, learning_rate, rho, one_minus_rho, inner, outer, weight_decay, clip, scale):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        s = rho * mean_square[i] + one_minus_rho * g * g
        mean_square[i] = s
        weights[i] -= learning_rate * g / (np.sqrt(s + inner) + outer)


@loop(4)
def rmsprop_momentum(
    weights, gradient, mean_square, velocity, entering, moving, mu, rho, one_minus_rho, inner, outer, weight_decay,
    clip, scale,
):  # fmt: skip
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        s = rho * mean_square[i] + one_minus_rho * g * g
        b = mu * velocity[i] + entering * g / (np.sqrt(s + inner) + outer)
        mean_square[i] = s
        velocity[i] = b
        weights[i] -= moving * b


@loop(5)
def rmsprop_centered(
    weights, gradient, mean_square, mean, velocity, entering, moving, mu, rho, one_minus_rho, inner, outer,
    weight_decay, clip, scale,
):  # fmt: skip
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        s = rho * mean_square[i] + one_minus_rho * g * g
        a = rho * mean[i] + one_minus_rho * g
        b = mu * velocity[i] + entering * g / (np.sqrt(max(s - a * a, _f32(0.0)) + inner) + outer)
        mean_square[i] = s
        mean[i] = a
        velocity[i] = b
        weights[i] -= moving * b


@loop(4)
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


@loop(4)
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


@loop(4, VECTOR, VECTOR)
def adam_by_row(
    weights, gradient, m, v, step_sizes, epsilons, beta1, one_minus_beta1, beta2, one_minus_beta2, weight_decay, clip,
    scale,
):  # fmt: skip
    for row in range(step_sizes.size):
        step_size, epsilon = step_sizes[row], epsilons[row]
        length = weights.size // step_sizes.size
        for i in range(row * length, (row + 1) * length):
            g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
            m_i = beta1 * m[i] + one_minus_beta1 * g
            v_i = beta2 * v[i] + one_minus_beta2 * g * g
            m[i] = m_i
            v[i] = v_i
            weights[i] -= step_size * m_i / (np.sqrt(v_i) + epsilon)


@loop(4, VECTOR, VECTOR)
def adamw_by_row(
    weights, gradient, m, v, step_sizes, epsilons, beta1, one_minus_beta1, beta2, one_minus_beta2, shrink, clip, scale
):
    for row in range(step_sizes.size):
        step_size, epsilon = step_sizes[row], epsilons[row]
        length = weights.size // step_sizes.size
        for i in range(row * length, (row + 1) * length):
            g = _prepared(gradient[i], weights[i], _f32(0.0), clip, scale)
            m_i = beta1 * m[i] + one_minus_beta1 * g
            v_i = beta2 * v[i] + one_minus_beta2 * g * g
            m[i] = m_i
            v[i] = v_i
            weights[i] -= step_size * m_i / (np.sqrt(v_i) + epsilon) + shrink * weights[i]


@loop(2, VECTOR)
def rowwise_adagrad(weights, gradient, accumulator, learning_rate, epsilon, weight_decay, clip, scale):
    length = weights.size // max(accumulator.size, 1)
    for row in range(accumulator.size):
        begin, end = row * length, (row + 1) * length
        total = _f32(0.0)
        for i in range(begin, end):
            g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
            total += g * g
        a = accumulator[row] + total / _f32(length)
        accumulator[row] = a
        divisor = np.sqrt(a) + epsilon
        for i in range(begin, end):
            g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
            weights[i] -= learning_rate * g / divisor


@loop(4)
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


@inlined
def _lamb_direction(m, v, weight, correction, epsilon, weight_decay):
    return correction * m / (np.sqrt(v) + epsilon) + weight_decay * weight


@loop(4, SUMS, VECTOR)
def lamb_moments(
    weights, gradient, m, v, squares, direction, beta1, one_minus_beta1, beta2, one_minus_beta2, correction, epsilon,
    weight_decay, clip, scale,
):  # fmt: skip
    """Update m and v; for each block of `direction.size` elements put two sums into `squares`.

    These are the squared norms of weights and direction; `squares` has 2 * blocks elements, `direction` is scratch.
    """
    for block in range(squares.size // 2):
        run = slice(block * direction.size, (block + 1) * direction.size)
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
        squares[2 * block] = of_weights
        squares[2 * block + 1] = of_direction


@loop(3)
def lamb_step(weights, m, v, correction, epsilon, weight_decay, rate):
    for i in range(weights.size):  # the direction again, rather than a scratch vector of the variable's size
        weights[i] -= rate * _lamb_direction(m[i], v[i], weights[i], correction, epsilon, weight_decay)


@loop(1)
def decay(weights, share):
    for i in range(weights.size):
        weights[i] -= share * weights[i]


@loop(2)
def accumulate(total, gradient):
    for i in range(total.size):
        total[i] += gradient[i]


@loop(1)
def is_finite(array):
    for begin in range(0, array.size, _FINITE_BLOCK_ELEMENTS):
        block = array[begin : begin + _FINITE_BLOCK_ELEMENTS]
        finite = True
        for i in range(block.size):  # without an exit, hence vectorised; NaN compares as false
            finite &= abs(block[i]) <= _LARGEST
        if not finite:
            return False
    return True


@loop(2)
def copy(destination, source):
    for i in range(destination.size):
        destination[i] = source[i]
