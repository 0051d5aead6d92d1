"""Each rule follows its paper: written here once more in float64, from the paper and in its letters.

The papers have neither scaling nor clipping, and most no weight decay: `g` is what `reference` calls prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parashard_server.state.kernels import fused
from support import reference_rules as reference
from support.hosted_cuda import Hosted
from support.kernel_cases import ADAM, update

START = [0.5, -1.25, 2.0, 0.0, -0.75]
STEPS = 5
RATE, DECAY, CLIP, SCALE = 0.1, 0.01, 0.6, 1.5
BETA1, BETA2, EPSILON = ADAM["beta1"], ADAM["beta2"], 1e-6
RMSPROP: dict[str, Any] = {"rho": 0.9, "epsilon": 1e-3}

State = tuple[Any, ...]
Formula = Callable[..., tuple[Any, State]]


def sgd(t: int, w: Any, g: Any, rate: float) -> tuple[Any, State]:
    """Robbins and Monro, 1951."""
    return w - rate * g, ()


def momentum(t: int, w: Any, g: Any, rate: float, b: Any) -> tuple[Any, State]:
    """Polyak, 1964, eq. 9."""
    b = 0.9 * b + g
    return w - rate * b, (b,)


def momentum_of_keras(t: int, w: Any, g: Any, rate: float, b: Any) -> tuple[Any, State]:
    """keras.optimizers.SGD: its velocity is the negative of ours."""
    velocity = 0.9 * -b - rate * g
    return w + velocity, (-velocity,)


def nesterov(t: int, w: Any, g: Any, rate: float, b: Any) -> tuple[Any, State]:
    """Bengio et al., ICASSP 2013, eq. 7: v' = mu v - rate g; w' = w + mu v' - rate g; ours is b = -v / rate."""
    v = 0.9 * (-rate * b) - rate * g
    return w + 0.9 * v - rate * g, (-v / rate,)


def nesterov_of_keras(t: int, w: Any, g: Any, rate: float, b: Any) -> tuple[Any, State]:
    """keras.optimizers.SGD(nesterov=True)."""
    velocity = 0.9 * -b - rate * g
    return w + 0.9 * velocity - rate * g, (-velocity,)


def adagrad(t: int, w: Any, g: Any, rate: float, G: Any) -> tuple[Any, State]:
    """Duchi et al., JMLR 2011, fig. 1, diagonal."""
    G = G + g**2
    return w - rate * g / (EPSILON + np.sqrt(G)), (G,)


def rowwise_adagrad(t: int, w: Any, g: Any, rate: float, G: Any) -> tuple[Any, State]:
    """FBGEMM's exact row-wise Adagrad; all weights are one row."""
    G = G + np.mean(g**2)
    return w - rate * g / (EPSILON + np.sqrt(G)), (G,)


def rmsprop(t: int, w: Any, g: Any, rate: float, s: Any) -> tuple[Any, State]:
    """Hinton, lecture 6e, 2012."""
    s = 0.9 * s + 0.1 * g**2
    return w - rate * g / (np.sqrt(s) + 1e-3), (s,)


def rmsprop_of_keras(t: int, w: Any, g: Any, rate: float, s: Any) -> tuple[Any, State]:
    """keras.optimizers.RMSprop."""
    s = 0.9 * s + 0.1 * g**2
    return w - rate * g / np.sqrt(s + 1e-3), (s,)


def rmsprop_momentum(t: int, w: Any, g: Any, rate: float, s: Any, b: Any) -> tuple[Any, State]:
    """torch.optim.RMSprop(momentum=0.8)."""
    s = 0.9 * s + 0.1 * g**2
    b = 0.8 * b + g / (np.sqrt(s) + 1e-3)
    return w - rate * b, (s, b)


def rmsprop_centered(t: int, w: Any, g: Any, rate: float, n: Any, mean: Any, delta: Any) -> tuple[Any, State]:
    """Graves, 2013, eqs. 38 to 41, with the rate of each gradient; ours is the negative of his delta."""
    n = 0.9 * n + 0.1 * g**2
    mean = 0.9 * mean + 0.1 * g
    step = 0.8 * -delta - rate * g / np.sqrt(n - mean**2 + 1e-3)
    return w + step, (n, mean, -step)


def adam(t: int, w: Any, g: Any, rate: float, m: Any, v: Any) -> tuple[Any, State]:
    """Kingma and Ba, ICLR 2015, algorithm 1."""
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g**2
    m_hat, v_hat = m / (1 - BETA1**t), v / (1 - BETA2**t)
    return w - rate * m_hat / (np.sqrt(v_hat) + EPSILON), (m, v)


def adamw(t: int, w: Any, g: Any, rate: float, m: Any, v: Any) -> tuple[Any, State]:
    """Loshchilov and Hutter, ICLR 2019, algorithm 2; the decay is multiplied by the rate, as in PyTorch."""
    moved, state = adam(t, w, g, rate, m, v)
    return moved - rate * DECAY * w, state


def lamb(t: int, w: Any, g: Any, rate: float, m: Any, v: Any) -> tuple[Any, State]:
    """You et al., ICLR 2020, algorithm 2, with phi the identity."""
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g**2
    r = m / (1 - BETA1**t) / (np.sqrt(v / (1 - BETA2**t)) + EPSILON)
    u = r + DECAY * w
    norms = np.linalg.norm(w), np.linalg.norm(u)
    return w - rate * (norms[0] / norms[1] if all(norms) else 1.0) * u, (m, v)


def ftrl(t: int, w: Any, g: Any, rate: float, z: Any, n: Any) -> tuple[Any, State]:
    """McMahan et al., KDD 2013, algorithm 1; beta is 1, lambda_1 0.2, lambda_2 0.5."""
    sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / rate
    z = z + g - sigma * w
    n = n + g**2
    solution = -(z - np.sign(z) * 0.2) / ((1.0 + np.sqrt(n)) / rate + 0.5)
    return np.where(np.abs(z) <= 0.2, 0.0, solution), (z, n)


KERAS = {"rate_in_velocity": 1.0}
OF_MOMENTS = {"beta1": BETA1, "beta2": BETA2, "epsilon": EPSILON}
PAPERS: dict[Formula, tuple[str, int, dict[str, float]]] = {  # of a formula: rule, slots, settings
    sgd: ("sgd", 0, {}),
    momentum: ("momentum", 1, {"momentum": 0.9}),
    momentum_of_keras: ("momentum", 1, {"momentum": 0.9} | KERAS),
    nesterov: ("nesterov", 1, {"momentum": 0.9}),
    nesterov_of_keras: ("nesterov", 1, {"momentum": 0.9} | KERAS),
    adagrad: ("adagrad", 1, {"epsilon": EPSILON}),
    rowwise_adagrad: ("rowwise_adagrad", 1, {"epsilon": EPSILON}),
    rmsprop: ("rmsprop", 1, RMSPROP),
    rmsprop_of_keras: ("rmsprop", 1, RMSPROP | {"epsilon_in_root": 1.0}),
    rmsprop_momentum: ("rmsprop_momentum", 2, RMSPROP | {"momentum": 0.8}),
    rmsprop_centered: ("rmsprop_centered", 3, RMSPROP | {"momentum": 0.8, "epsilon_in_root": 1.0} | KERAS),
    adam: ("adam", 2, OF_MOMENTS),
    adamw: ("adamw", 2, OF_MOMENTS),
    lamb: ("lamb", 2, OF_MOMENTS),
    ftrl: ("ftrl", 2, {"beta": 1.0, "l1": 0.2, "l2": 0.5}),
}
DECOUPLED = (adamw, lamb)
BY_ROW = (adam, adamw)


def gradient(t: int) -> np.ndarray:
    """Return the gradient of a step: eighths, exact in float32."""
    return np.array([((7 * i + 5 * t) % 11 - 5) / 8 for i in range(len(START))], np.float32)


def follow(kernels: Any, formula: Formula, start: list[float] = START, *, by_row: bool = False) -> None:
    """Assert that weights and slots are those of the formula after each step; the rate falls."""
    rule, slots, settings = PAPERS[formula]
    w, state = np.array(start), tuple(np.zeros(len(start)) for _ in range(slots))
    weights = w.astype(np.float32)
    held = [np.zeros(1 if rule == "rowwise_adagrad" else len(start), np.float32) for _ in range(slots)]
    for t in range(1, STEPS + 1):
        rate, g = RATE / t, np.clip(gradient(t).astype(np.float64) * SCALE, -CLIP, CLIP)
        w, state = formula(t, w, g if formula in DECOUPLED else g + DECAY * w, rate, *state)
        update(
            kernels, rule, weights, gradient(t), *held, t=np.array([t], np.uint32) if by_row else t,
            learning_rate=rate, weight_decay=DECAY, clip=CLIP, scale=SCALE, **settings,
        )  # fmt: skip
        for array, expected in zip((weights, *held), (w, *state), strict=True):
            np.testing.assert_allclose(array, expected[: len(array)], rtol=5e-6, atol=5e-7)


@pytest.mark.parametrize("kernels", [fused, reference])
@pytest.mark.parametrize("formula", PAPERS)
def test_a_rule_follows_its_paper(kernels: Any, formula: Formula) -> None:
    follow(kernels, formula)


@pytest.mark.parametrize("formula", [formula for formula in PAPERS if formula is not rowwise_adagrad])
def test_the_source_of_a_gpu_follows_it_too(on_this_cpu: Hosted, formula: Formula) -> None:
    follow(on_this_cpu, formula)


@pytest.mark.parametrize("kernels", [fused, reference])
@pytest.mark.parametrize("formula", BY_ROW)
def test_a_row_follows_the_paper_by_its_own_t(kernels: Any, formula: Formula) -> None:
    follow(kernels, formula, by_row=True)


@pytest.mark.parametrize("kernels", [fused, reference])
def test_lamb_of_weights_without_a_norm_takes_the_step_as_it_is(kernels: Any) -> None:
    follow(kernels, lamb, [0.0] * len(START))


def test_both_branches_of_ftrl_are_taken() -> None:
    w, _ = ftrl(1, np.array(START), gradient(1).astype(np.float64), RATE, np.zeros(5), np.zeros(5))
    assert 0.0 in w
    assert any(w)
