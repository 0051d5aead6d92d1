"""Update rules in NumPy: the readable specification of the fused kernels, bit for bit.

Knows nothing of specs, variables, schedules or shards. Called by the tests, and by `parashard_server.state.optimizer`
where it is injected. Every function works in place on 1-D contiguous float32 arrays of one length: a run of a shard's
flat vector.

Conventions, the same for all:

- `gradient` is only read. Below, g is the *prepared* gradient: min(max(gradient * scale, -clip), clip) + lambda * w,
  where `scale` makes a mean of a sum (1/n), `clip` bounds each element (infinity: off), and lambda is `weight_decay`.
- Scalars arrive as Python floats. Those that depend on others, such as 1 - beta1, are computed in float64 and then
  rounded to float32 once.
- Elementwise operations are float32 with one rounding each, in the order in which the expressions below say it
  (products and sums from left to right). No fused multiply-add, no reassociation: an element's result depends on that
  element alone, so that cutting the vector anywhere changes nothing. LAMB's norms are the exception, hence its whole
  variables.
- Nothing is checked: the caller ensures finite gradients and matching lengths before the first write.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from parashard.plan.variables import Float32s
from parashard_server.state.kernels.scalars import (
    BLOCK_ELEMENTS,
    SMALLEST_FTRL_RATE,
    bias_corrected,
    corrections,
    epsilons,
    momentum_factors,
    trust_ratio,
)

_f32 = np.float32


def sgd(
    weights: Float32s, gradient: Float32s, *, learning_rate: float, weight_decay: float, clip: float, scale: float
) -> None:
    """Gradient descent: w <- w - alpha g (Robbins and Monro, 1951)."""
    g = _prepared(weights, gradient, weight_decay, clip, scale)
    weights -= _f32(learning_rate) * g


def momentum(
    weights: Float32s, gradient: Float32s, velocity: Float32s,
    *, learning_rate: float, momentum: float, rate_in_velocity: float = 0.0, weight_decay: float, clip: float,
    scale: float,
) -> None:  # fmt: skip
    """Heavy ball: b <- mu b + g; w <- w - alpha b (Polyak, 1964, eq. 9).

    As in PyTorch the rate multiplies the velocity when it is used, not the gradient when it enters: a schedule acts on
    the whole step at once. With `rate_in_velocity`, as in Keras: b <- mu b + alpha g; w <- w - b. At a constant rate
    the two are the same.
    """
    entering, moving = momentum_factors(learning_rate, rate_in_velocity)
    g = _f32(entering) * _prepared(weights, gradient, weight_decay, clip, scale)
    velocity[:] = _f32(momentum) * velocity + g
    weights -= _f32(moving) * velocity


def nesterov(
    weights: Float32s, gradient: Float32s, velocity: Float32s,
    *, learning_rate: float, momentum: float, rate_in_velocity: float = 0.0, weight_decay: float, clip: float,
    scale: float,
) -> None:  # fmt: skip
    """Nesterov's momentum: b <- mu b + g; w <- w - alpha (g + mu b) (Sutskever et al., ICML 2013, eqs. 3 and 4).

    In the form of Bengio et al. (ICASSP 2013, eq. 7), as in PyTorch: `weights` holds the point at which the next
    gradient is taken, so that workers pull exactly that. `rate_in_velocity` as in `momentum`, g multiplied by alpha.
    """
    entering, moving = momentum_factors(learning_rate, rate_in_velocity)
    g = _f32(entering) * _prepared(weights, gradient, weight_decay, clip, scale)
    velocity[:] = _f32(momentum) * velocity + g
    weights -= _f32(moving) * (g + _f32(momentum) * velocity)


def adagrad(
    weights: Float32s, gradient: Float32s, accumulator: Float32s,
    *, learning_rate: float, epsilon: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """Adagrad: a <- a + g g; w <- w - alpha g / (sqrt(a) + epsilon) (Duchi et al., JMLR 2011, fig. 1, diagonal).

    `epsilon` is the paper's delta. Without its proximal term.
    """
    g = _prepared(weights, gradient, weight_decay, clip, scale)
    accumulator += g * g
    weights -= _f32(learning_rate) * g / (np.sqrt(accumulator) + _f32(epsilon))


def rmsprop(
    weights: Float32s, gradient: Float32s, mean_square: Float32s,
    *, learning_rate: float, rho: float, epsilon: float, epsilon_in_root: float = 0.0, weight_decay: float, clip: float,
    scale: float,
) -> None:  # fmt: skip
    """RMSProp: s <- rho s + (1 - rho) g g; w <- w - alpha g / (sqrt(s) + epsilon) (Hinton, lecture 6e, 2012).

    The lecture has no epsilon; it stands outside the root, as in PyTorch, or with `epsilon_in_root` within, as in
    Keras: sqrt(s + epsilon).
    """
    inner, outer = epsilons(epsilon, epsilon_in_root)
    g = _prepared(weights, gradient, weight_decay, clip, scale)
    mean_square[:] = _f32(rho) * mean_square + _f32(1.0 - rho) * g * g
    weights -= _f32(learning_rate) * g / (np.sqrt(mean_square + _f32(inner)) + _f32(outer))


def rmsprop_momentum(
    weights: Float32s, gradient: Float32s, mean_square: Float32s, velocity: Float32s,
    *, learning_rate: float, rho: float, epsilon: float, epsilon_in_root: float = 0.0, momentum: float,
    rate_in_velocity: float = 0.0, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """RMSProp with momentum: its quotient g / (sqrt(s) + epsilon) is the gradient of `momentum` (Graves, 2013)."""
    inner, outer = epsilons(epsilon, epsilon_in_root)
    entering, moving = momentum_factors(learning_rate, rate_in_velocity)
    g = _prepared(weights, gradient, weight_decay, clip, scale)
    mean_square[:] = _f32(rho) * mean_square + _f32(1.0 - rho) * g * g
    quotient = _f32(entering) * g / (np.sqrt(mean_square + _f32(inner)) + _f32(outer))
    velocity[:] = _f32(momentum) * velocity + quotient
    weights -= _f32(moving) * velocity


def rmsprop_centered(
    weights: Float32s, gradient: Float32s, mean_square: Float32s, mean: Float32s, velocity: Float32s,
    *, learning_rate: float, rho: float, epsilon: float, epsilon_in_root: float = 0.0, momentum: float,
    rate_in_velocity: float = 0.0, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """`rmsprop_momentum` with an estimate of the variance under the root (Graves, 2013, eqs. 38 to 41).

    a <- rho a + (1 - rho) g; max(s - a a, 0) in place of s, where others have the root of a number below 0 by rounding.
    """
    inner, outer = epsilons(epsilon, epsilon_in_root)
    entering, moving = momentum_factors(learning_rate, rate_in_velocity)
    g = _prepared(weights, gradient, weight_decay, clip, scale)
    mean_square[:] = _f32(rho) * mean_square + _f32(1.0 - rho) * g * g
    mean[:] = _f32(rho) * mean + _f32(1.0 - rho) * g
    variance = np.maximum(mean_square - mean * mean, _f32(0.0))
    quotient = _f32(entering) * g / (np.sqrt(variance + _f32(inner)) + _f32(outer))
    velocity[:] = _f32(momentum) * velocity + quotient
    weights -= _f32(moving) * velocity


def adam(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """Adam (Kingma and Ba, ICLR 2015, algorithm 1).

    m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g g; w <- w - alpha c m / (sqrt(v) + epsilon_t), with c and
    epsilon_t of `scalars.bias_corrected`. `t` counts from 1 and is the caller's.
    """
    g = _prepared(weights, gradient, weight_decay, clip, scale)
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    _moments(g, m, v, beta1, beta2)
    weights -= _f32(learning_rate * correction) * m / (np.sqrt(v) + _f32(epsilon_t))


def adamw(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019, algorithm 2).

    As `adam` with g free of weight decay, and w <- w - (alpha c m / (sqrt(v) + epsilon_t) + alpha lambda w). The decay
    is multiplied by the whole learning rate, as in PyTorch; in the paper by its schedule's multiplier alone.
    """
    g = _prepared(weights, gradient, 0.0, clip, scale)
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    _moments(g, m, v, beta1, beta2)
    step = _f32(learning_rate * correction) * m / (np.sqrt(v) + _f32(epsilon_t))
    weights -= step + _f32(learning_rate * weight_decay) * weights


def ftrl(
    weights: Float32s, gradient: Float32s, z: Float32s, n: Float32s,
    *, learning_rate: float, beta: float, l1: float, l2: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """FTRL-Proximal (McMahan et al., KDD 2013, algorithm 1).

    z <- z + g - (sqrt(n + g g) - sqrt(n)) / alpha w; n <- n + g g; then w <- 0 where |z| <= l1, and elsewhere
    w <- -(z - sign(z) l1) / ((beta + sqrt(n)) / alpha + l2).

    A learning rate under SMALLEST_FTRL_RATE leaves weights and slots as they were. With `weight_decay` the L2 penalty
    also enters g; the paper has `l2` alone.
    """
    if learning_rate < SMALLEST_FTRL_RATE:
        return
    g = _prepared(weights, gradient, weight_decay, clip, scale)
    reciprocal = _f32(1.0 / learning_rate)
    root_before = np.sqrt(n)
    n += g * g
    root = np.sqrt(n)
    z += g - (root - root_before) * reciprocal * weights
    zero = _f32(0.0)
    shrunk = np.where(z > _f32(l1), z - _f32(l1), np.where(z < -_f32(l1), z + _f32(l1), zero))
    weights[:] = (zero - shrunk) / ((_f32(beta) + root) * reciprocal + _f32(l2))


def lamb(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """LAMB (You et al., ICLR 2020, algorithm 2, with phi the identity); the arrays are one whole variable.

    m and v as in `adam` with g free of weight decay; u = c m / (sqrt(v) + epsilon_t) + lambda w; then
    w <- w - alpha |w| / |u| u, where |w| / |u| is 1 if either norm is 0. Squares are exact in float64 and added in
    index order within blocks of BLOCK_ELEMENTS, whose sums are added in order.
    """
    g = _prepared(weights, gradient, 0.0, clip, scale)
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    _moments(g, m, v, beta1, beta2)
    u = _f32(correction) * m / (np.sqrt(v) + _f32(epsilon_t)) + _f32(weight_decay) * weights
    ratio = trust_ratio(np.stack([_squares_of_blocks(weights), _squares_of_blocks(u)], axis=1))
    weights -= _f32(learning_rate * ratio) * u


def adam_by_row(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: NDArray[np.uint32],
) -> None:  # fmt: skip
    """`adam` for rows of a table, end to end; `t` has one for each: how often that row was pushed."""
    g = _prepared(weights, gradient, weight_decay, clip, scale)
    _moments(g, m, v, beta1, beta2)
    weights -= _adam_steps(m, v, learning_rate, beta1, beta2, epsilon, t)


def adamw_by_row(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: NDArray[np.uint32],
) -> None:  # fmt: skip
    """`adamw` for rows of a table, as `adam_by_row`: only pushed rows decay."""
    g = _prepared(weights, gradient, 0.0, clip, scale)
    _moments(g, m, v, beta1, beta2)
    step = _adam_steps(m, v, learning_rate, beta1, beta2, epsilon, t)
    weights -= step + _f32(learning_rate * weight_decay) * weights


def rowwise_adagrad(
    weights: Float32s, gradient: Float32s, accumulator: Float32s,
    *, learning_rate: float, epsilon: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """Adagrad with one number for each row: a <- a + mean(g g); w <- w - alpha g / (sqrt(a) + epsilon).

    FBGEMM's exact row-wise Adagrad, TorchRec's default. Squares are added in the order of the row's elements.
    """
    rows = max(len(accumulator), 1)
    g = _prepared(weights, gradient, weight_decay, clip, scale).reshape(rows, -1)
    total = np.zeros(len(g), np.float32)
    for column in g.T:
        total += column * column
    accumulator += (total / _f32(g.shape[1]))[: len(accumulator)]
    weights -= (_f32(learning_rate) * g / (np.sqrt(accumulator) + _f32(epsilon))[:, None]).reshape(-1)


def decay(weights: Float32s, share: float) -> None:
    """Shrink weights: w <- w - share w (the decoupled weight decay of rules other than `adamw` and `lamb`)."""
    weights -= _f32(share) * weights


def accumulate(total: Float32s, gradient: Float32s) -> None:
    """Add a gradient to a round's sum: total <- total + gradient. The caller keeps the order of steps."""
    total += gradient


def is_finite(array: Float32s) -> bool:
    """Return whether no element is NaN or infinite."""
    return bool(np.isfinite(array).all())


def copy(destination: Float32s, source: Float32s) -> None:
    """Copy a vector; the two must not overlap."""
    destination[:] = source


def _prepared(weights: Float32s, gradient: Float32s, weight_decay: float, clip: float, scale: float) -> Float32s:
    clipped: Float32s = np.clip(gradient * _f32(scale), -_f32(clip), _f32(clip))
    return clipped + _f32(weight_decay) * weights


def _moments(g: Float32s, m: Float32s, v: Float32s, beta1: float, beta2: float) -> None:
    m[:] = _f32(beta1) * m + _f32(1.0 - beta1) * g
    v[:] = _f32(beta2) * v + _f32(1.0 - beta2) * g * g


def _adam_steps(
    m: Float32s, v: Float32s, learning_rate: float, beta1: float, beta2: float, epsilon: float, t: NDArray[np.uint32]
) -> Float32s:
    factors, roots = corrections(beta1, beta2).of(t)
    length = m.size // max(len(t), 1)
    step_sizes = np.repeat((learning_rate * factors).astype(np.float32), length)
    steps: Float32s = step_sizes * m / (np.sqrt(v) + np.repeat((epsilon * roots).astype(np.float32), length))
    return steps


def _squares_of_blocks(values: Float32s) -> NDArray[np.float64]:
    squares = values.astype(np.float64) ** 2
    starts = range(0, squares.size, BLOCK_ELEMENTS)
    sums = [np.add.accumulate(squares[start : start + BLOCK_ELEMENTS])[-1] for start in starts]  # np.sum adds in pairs
    return np.array(sums, np.float64)
