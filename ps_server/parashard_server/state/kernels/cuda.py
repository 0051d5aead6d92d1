"""The update rules as CUDA kernels, by CuPy: the signatures of `fused`, on vectors of a GPU.

Rounds scalars to float32 where `reference` does, and launches on the calling thread's current device and stream; knows
no shard. Called by `parashard_server.state.optimizer` for a shard on a GPU. See `reference` for what each
function does.

Each element goes through the operations of `reference` in its order, with one rounding each: no contraction of a
product and a sum into one (`--fmad=false`), and NVRTC's defaults for the rest, which are correctly rounded division and
square root and no flushing of subnormals. LAMB's norms are added block by block, in index order. So the bits are meant
to be those of the reference, on any GPU; a test marked `gpu` compares them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from parashard.process import cuda
from parashard_server.state.kernels.scalars import (
    BLOCK_ELEMENTS,
    SMALLEST_FTRL_RATE,
    bias_corrected,
    epsilons,
    momentum_factors,
    trust_ratio,
)

Resident = Any  # a flat vector of float32 on the device

OPTIONS = ("--fmad=false",)

_f32 = np.float32
_PREPARED = """
__device__ float smaller(float a, float b) { return b < a ? b : a; }
__device__ float larger(float a, float b) { return a < b ? b : a; }
__device__ float prepared(float g, float w, float weight_decay, float clip, float scale) {
    return smaller(larger(g * scale, -clip), clip) + weight_decay * w;
}
"""
"""NaN stays NaN as in NumPy: fminf and fmaxf would return their other argument."""


def sgd(
    weights: Resident, gradient: Resident, *, learning_rate: float, weight_decay: float, clip: float, scale: float
) -> None:
    """See `reference.sgd`."""
    kernel = _compiled(
        "sgd",
        "float32 g, float32 learning_rate, float32 weight_decay, float32 clip, float32 scale",
        "float32 w",
        "w -= learning_rate * prepared(g, w, weight_decay, clip, scale);",
    )
    kernel(gradient, _f32(learning_rate), _f32(weight_decay), _f32(clip), _f32(scale), weights)


def momentum(
    weights: Resident, gradient: Resident, velocity: Resident,
    *, learning_rate: float, momentum: float, rate_in_velocity: float = 0.0, weight_decay: float, clip: float,
    scale: float,
) -> None:  # fmt: skip
    """See `reference.momentum`."""
    kernel = _compiled(
        "momentum",
        f"float32 g, {_MOMENTUM}, float32 weight_decay, float32 clip, float32 scale",
        "float32 w, float32 velocity",
        """
        velocity = mu * velocity + entering * prepared(g, w, weight_decay, clip, scale);
        w -= moving * velocity;
        """,
    )
    factors = _momentum(learning_rate, momentum, rate_in_velocity)
    kernel(gradient, *factors, _f32(weight_decay), _f32(clip), _f32(scale), weights, velocity)


def nesterov(
    weights: Resident, gradient: Resident, velocity: Resident,
    *, learning_rate: float, momentum: float, rate_in_velocity: float = 0.0, weight_decay: float, clip: float,
    scale: float,
) -> None:  # fmt: skip
    """See `reference.nesterov`."""
    kernel = _compiled(
        "nesterov",
        f"float32 g, {_MOMENTUM}, float32 weight_decay, float32 clip, float32 scale",
        "float32 w, float32 velocity",
        """
        float p = entering * prepared(g, w, weight_decay, clip, scale);
        velocity = mu * velocity + p;
        w -= moving * (p + mu * velocity);
        """,
    )
    factors = _momentum(learning_rate, momentum, rate_in_velocity)
    kernel(gradient, *factors, _f32(weight_decay), _f32(clip), _f32(scale), weights, velocity)


def adagrad(
    weights: Resident, gradient: Resident, accumulator: Resident,
    *, learning_rate: float, epsilon: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.adagrad`."""
    kernel = _compiled(
        "adagrad",
        "float32 g, float32 learning_rate, float32 epsilon, float32 weight_decay, float32 clip, float32 scale",
        "float32 w, float32 accumulator",
        """
        float p = prepared(g, w, weight_decay, clip, scale);
        accumulator += p * p;
        w -= learning_rate * p / (sqrtf(accumulator) + epsilon);
        """,
    )
    settings = (_f32(learning_rate), _f32(epsilon), _f32(weight_decay), _f32(clip), _f32(scale))
    kernel(gradient, *settings, weights, accumulator)


def rmsprop(
    weights: Resident, gradient: Resident, mean_square: Resident,
    *, learning_rate: float, rho: float, epsilon: float, epsilon_in_root: float = 0.0, weight_decay: float, clip: float,
    scale: float,
) -> None:  # fmt: skip
    """See `reference.rmsprop`."""
    kernel = _compiled(
        "rmsprop",
        f"float32 g, float32 learning_rate, {_MEANS}, float32 weight_decay, float32 clip, float32 scale",
        "float32 w, float32 mean_square",
        """
        float p = prepared(g, w, weight_decay, clip, scale);
        mean_square = rho * mean_square + one_minus_rho * p * p;
        w -= learning_rate * p / (sqrtf(mean_square + inner) + outer);
        """,
    )
    means = _means(rho, epsilon, epsilon_in_root)
    kernel(
        gradient, _f32(learning_rate), *means, _f32(weight_decay), _f32(clip), _f32(scale), weights, mean_square
    )  # fmt: skip


def rmsprop_momentum(
    weights: Resident, gradient: Resident, mean_square: Resident, velocity: Resident,
    *, learning_rate: float, rho: float, epsilon: float, epsilon_in_root: float = 0.0, momentum: float,
    rate_in_velocity: float = 0.0, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.rmsprop_momentum`."""
    kernel = _compiled(
        "rmsprop_momentum",
        f"float32 g, {_MOMENTUM}, {_MEANS}, float32 weight_decay, float32 clip, float32 scale",
        "float32 w, float32 mean_square, float32 velocity",
        """
        float p = prepared(g, w, weight_decay, clip, scale);
        mean_square = rho * mean_square + one_minus_rho * p * p;
        velocity = mu * velocity + entering * p / (sqrtf(mean_square + inner) + outer);
        w -= moving * velocity;
        """,
    )
    settings = (*_momentum(learning_rate, momentum, rate_in_velocity), *_means(rho, epsilon, epsilon_in_root))
    kernel(gradient, *settings, _f32(weight_decay), _f32(clip), _f32(scale), weights, mean_square, velocity)


def rmsprop_centered(
    weights: Resident, gradient: Resident, mean_square: Resident, mean: Resident, velocity: Resident,
    *, learning_rate: float, rho: float, epsilon: float, epsilon_in_root: float = 0.0, momentum: float,
    rate_in_velocity: float = 0.0, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.rmsprop_centered`."""
    kernel = _compiled(
        "rmsprop_centered",
        f"float32 g, {_MOMENTUM}, {_MEANS}, float32 weight_decay, float32 clip, float32 scale",
        "float32 w, float32 mean_square, float32 mean, float32 velocity",
        """
        float p = prepared(g, w, weight_decay, clip, scale);
        mean_square = rho * mean_square + one_minus_rho * p * p;
        mean = rho * mean + one_minus_rho * p;
        float variance = larger(mean_square - mean * mean, 0.0f);
        velocity = mu * velocity + entering * p / (sqrtf(variance + inner) + outer);
        w -= moving * velocity;
        """,
    )
    settings = (*_momentum(learning_rate, momentum, rate_in_velocity), *_means(rho, epsilon, epsilon_in_root))
    kernel(gradient, *settings, _f32(weight_decay), _f32(clip), _f32(scale), weights, mean_square, mean, velocity)


def adam(
    weights: Resident, gradient: Resident, m: Resident, v: Resident,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """See `reference.adam`."""
    kernel = _compiled(
        "adam",
        f"float32 g, float32 step_size, {_MOMENTS}, float32 weight_decay, float32 clip, float32 scale",
        "float32 w, float32 m, float32 v",
        f"""
        float p = prepared(g, w, weight_decay, clip, scale);
        {_MOVE_MOMENTS}
        w -= step_size * m / (sqrtf(v) + epsilon);
        """,
    )
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    settings = (_f32(learning_rate * correction), *_moments(beta1, beta2, epsilon_t))
    kernel(gradient, *settings, _f32(weight_decay), _f32(clip), _f32(scale), weights, m, v)


def adamw(
    weights: Resident, gradient: Resident, m: Resident, v: Resident,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """See `reference.adamw`."""
    kernel = _compiled(
        "adamw",
        f"float32 g, float32 step_size, {_MOMENTS}, float32 shrink, float32 clip, float32 scale",
        "float32 w, float32 m, float32 v",
        f"""
        float p = prepared(g, w, 0.0f, clip, scale);
        {_MOVE_MOMENTS}
        w -= step_size * m / (sqrtf(v) + epsilon) + shrink * w;
        """,
    )
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    settings = (_f32(learning_rate * correction), *_moments(beta1, beta2, epsilon_t))
    kernel(gradient, *settings, _f32(learning_rate * weight_decay), _f32(clip), _f32(scale), weights, m, v)


def ftrl(
    weights: Resident, gradient: Resident, z: Resident, n: Resident,
    *, learning_rate: float, beta: float, l1: float, l2: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.ftrl`."""
    if learning_rate < SMALLEST_FTRL_RATE:
        return
    kernel = _compiled(
        "ftrl",
        "float32 g, float32 reciprocal, float32 beta, float32 l1, float32 l2, float32 weight_decay, float32 clip, "
        "float32 scale",
        "float32 w, float32 z, float32 squares",  # CuPy keeps the name n for itself
        """
        float p = prepared(g, w, weight_decay, clip, scale);
        float root_before = sqrtf(squares);
        squares += p * p;
        float root = sqrtf(squares);
        z += p - (root - root_before) * reciprocal * w;
        float shrunk = z > l1 ? z - l1 : (z < -l1 ? z + l1 : 0.0f);
        w = (0.0f - shrunk) / ((beta + root) * reciprocal + l2);
        """,
    )
    settings = (_f32(1.0 / learning_rate), _f32(beta), _f32(l1), _f32(l2), _f32(weight_decay), _f32(clip), _f32(scale))
    kernel(gradient, *settings, weights, z, n)


def lamb(
    weights: Resident, gradient: Resident, m: Resident, v: Resident,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """See `reference.lamb`. Synchronises for the norms; allocates the direction, a vector of the variable's size."""
    to_direction = _compiled(
        "lamb_direction",
        f"float32 g, float32 correction, {_MOMENTS}, float32 weight_decay, float32 clip, float32 scale, float32 w",
        "float32 m, float32 v, float32 direction",
        f"""
        float p = prepared(g, w, 0.0f, clip, scale);
        {_MOVE_MOMENTS}
        direction = correction * m / (sqrtf(v) + epsilon) + weight_decay * w;
        """,
    )
    move = _compiled("lamb_move", "float32 direction, float32 rate", "float32 w", "w -= rate * direction;")
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    settings = (_f32(correction), *_moments(beta1, beta2, epsilon_t), _f32(weight_decay), _f32(clip), _f32(scale))
    direction = cuda.namespace().empty_like(weights)
    to_direction(gradient, *settings, weights, m, v, direction)
    move(direction, _f32(learning_rate * trust_ratio(_squares_of_blocks(weights, direction))), weights)


def decay(weights: Resident, share: float) -> None:
    """See `reference.decay`."""
    _compiled("decay", "float32 share", "float32 w", "w -= share * w;")(_f32(share), weights)


_MOMENTUM = "float32 entering, float32 moving, float32 mu"
_MEANS = "float32 rho, float32 one_minus_rho, float32 inner, float32 outer"
_MOMENTS = "float32 beta1, float32 one_minus_beta1, float32 beta2, float32 one_minus_beta2, float32 epsilon"
_MOVE_MOMENTS = """
        m = beta1 * m + one_minus_beta1 * p;
        v = beta2 * v + one_minus_beta2 * p * p;
"""


def _momentum(learning_rate: float, momentum: float, rate_in_velocity: float) -> tuple[np.float32, ...]:
    entering, moving = momentum_factors(learning_rate, rate_in_velocity)
    return _f32(entering), _f32(moving), _f32(momentum)


def _means(rho: float, epsilon: float, epsilon_in_root: float) -> tuple[np.float32, ...]:
    inner, outer = epsilons(epsilon, epsilon_in_root)
    return _f32(rho), _f32(1.0 - rho), _f32(inner), _f32(outer)


def _moments(beta1: float, beta2: float, epsilon_t: float) -> tuple[np.float32, ...]:
    return _f32(beta1), _f32(1.0 - beta1), _f32(beta2), _f32(1.0 - beta2), _f32(epsilon_t)


def _squares_of_blocks(weights: Resident, direction: Resident) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the squared norms of two vectors, block by block, on the host: shape (blocks, 2)."""
    kernel = _compiled(
        "squares_of_blocks",
        "raw float32 w, raw float32 u, int64 elements, int64 block_elements",
        "float64 of_w, float64 of_u",
        """
        long long stop = (i + 1) * block_elements;  // i is the block: one thread adds it up, in index order
        if (stop > elements) stop = elements;
        double ww = 0.0, uu = 0.0;
        for (long long j = i * block_elements; j < stop; ++j) {
            double a = w[j], b = u[j];
            ww += a * a;
            uu += b * b;
        }
        of_w = ww;
        of_u = uu;
        """,
    )
    squares = cuda.namespace().empty((2, -(-weights.size // BLOCK_ELEMENTS)), np.float64)
    kernel(weights, direction, weights.size, BLOCK_ELEMENTS, squares[0], squares[1])
    return np.ascontiguousarray(squares.get().T)


@functools.cache
def _compiled(name: str, inputs: str, outputs: str, operation: str) -> Any:
    """Return a kernel that does an operation to each element; outputs are read and written in place."""
    return cuda.namespace().ElementwiseKernel(
        inputs, outputs, operation, f"parashard_{name}", preamble=_PREPARED, options=OPTIONS, no_return=True
    )
