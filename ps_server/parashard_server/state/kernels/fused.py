"""The update rules as compiled loops, on several threads: the signatures and the bits of `reference`.

Rounds scalars to float32 and hands each loop to the lanes. Called by `parashard_server.state.optimizer` and by the
shard. See `reference` for what each function does; the bits do not depend on the number of threads (P13).
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np

from parashard.plan.variables import Float32s
from parashard_server.state.kernels.lanes import Lanes
from parashard_server.state.kernels.scalars import BLOCK_ELEMENTS, SMALLEST_FTRL_RATE, bias_corrected, trust_ratio

_f32 = np.float32
_lanes = Lanes(1)


@cache
def _loops() -> ModuleType:
    """Return the compiled loops; importing them loads Numba, which nothing of a shard needs before its kernels."""
    from parashard_server.state.kernels import loops

    return loops


def use_threads(threads: int) -> None:
    """Set how many threads work on one large call, for the whole process; while no kernel runs."""
    global _lanes  # noqa: PLW0603  # like the threads of BLAS: cores are the process's, and bits do not depend on it
    if threads != _lanes.threads:
        _lanes.close()
        _lanes = Lanes(threads)


def warm_up(*, rounds: bool = True, compensated: bool = True) -> None:
    """Compile the kernels that pushes need besides their optimizer's, or load them from the cache.

    Parameters
    ----------
    rounds : bool
        With the kernel that adds gradients.
    compensated : bool
        With the kernel of delay compensation.
    """
    values, received = np.empty(0, np.float32), np.empty(0, np.float32)
    received.flags.writeable = False
    for gradient in (values, received):
        is_finite(gradient)
        copy(values, gradient)
        if rounds:
            accumulate(values, gradient)
    if compensated:
        delay_compensated(values, values, values, 0.0)


def sgd(
    weights: Float32s, gradient: Float32s, *, learning_rate: float, weight_decay: float, clip: float, scale: float
) -> None:
    """See `reference.sgd`."""
    _lanes.run(_loops().sgd, (weights, gradient), _f32(learning_rate), _f32(weight_decay), _f32(clip), _f32(scale))


def momentum(
    weights: Float32s, gradient: Float32s, velocity: Float32s,
    *, learning_rate: float, momentum: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.momentum`."""
    _lanes.run(
        _loops().momentum, (weights, gradient, velocity),
        _f32(learning_rate), _f32(momentum), _f32(weight_decay), _f32(clip), _f32(scale),
    )  # fmt: skip


def nesterov(
    weights: Float32s, gradient: Float32s, velocity: Float32s,
    *, learning_rate: float, momentum: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.nesterov`."""
    _lanes.run(
        _loops().nesterov, (weights, gradient, velocity),
        _f32(learning_rate), _f32(momentum), _f32(weight_decay), _f32(clip), _f32(scale),
    )  # fmt: skip


def adagrad(
    weights: Float32s, gradient: Float32s, accumulator: Float32s,
    *, learning_rate: float, epsilon: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.adagrad`."""
    _lanes.run(
        _loops().adagrad, (weights, gradient, accumulator),
        _f32(learning_rate), _f32(epsilon), _f32(weight_decay), _f32(clip), _f32(scale),
    )  # fmt: skip


def rmsprop(
    weights: Float32s, gradient: Float32s, mean_square: Float32s,
    *, learning_rate: float, rho: float, epsilon: float, weight_decay: float, clip: float, scale: float,
) -> None:  # fmt: skip
    """See `reference.rmsprop`."""
    _lanes.run(
        _loops().rmsprop, (weights, gradient, mean_square),
        _f32(learning_rate), _f32(rho), _f32(1.0 - rho), _f32(epsilon), _f32(weight_decay), _f32(clip), _f32(scale),
    )  # fmt: skip


def adam(
    weights: Float32s, gradient: Float32s, m: Float32s, v: Float32s,
    *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float,
    scale: float, t: int,
) -> None:  # fmt: skip
    """See `reference.adam`."""
    correction, epsilon_t = bias_corrected(beta1, beta2, epsilon, t)
    _lanes.run(
        _loops().adam, (weights, gradient, m, v),
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
    _lanes.run(
        _loops().adamw, (weights, gradient, m, v),
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
    _lanes.run(
        _loops().ftrl, (weights, gradient, z, n),
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
    squares = _lanes.run(
        _loops().lamb_moments, (weights, gradient, m, v),
        _f32(beta1), _f32(1.0 - beta1), _f32(beta2), _f32(1.0 - beta2), *direction, _f32(clip), _f32(scale),
        BLOCK_ELEMENTS,
    )  # fmt: skip
    ratio = trust_ratio(np.concatenate(squares))
    _lanes.run(_loops().lamb_step, (weights, m, v), *direction, _f32(learning_rate * ratio))


def accumulate(total: Float32s, gradient: Float32s) -> None:
    """See `reference.accumulate`."""
    _lanes.run(_loops().accumulate, (total, gradient))


def delay_compensated(gradient: Float32s, weights: Float32s, pulled: Float32s, strength: float) -> None:
    """See `reference.delay_compensated`."""
    _lanes.run(_loops().delay_compensated, (gradient, weights, pulled), _f32(strength))


def is_finite(array: Float32s) -> bool:
    """See `reference.is_finite`."""
    return all(_lanes.run(_loops().is_finite, (array,)))


def copy(destination: Float32s, source: Float32s) -> None:
    """See `reference.copy`."""
    _lanes.run(_loops().copy, (destination, source))
