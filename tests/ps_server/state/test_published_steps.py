"""The kernels end where PyTorch's optimizers do: its numbers are constants here."""

import math
from typing import Any

import numpy as np
import pytest

from parashard_server.state.kernels import fused
from support import reference_rules as reference
from support.kernel_cases import update

START = [0.5, -1.25, 2.0, 0.0, -0.75]
STEPS = 4


def gradient(t: int) -> np.ndarray:
    """Return the t-th gradient of all tests here: eighths, exact in float32."""
    return np.array([((7 * i + 5 * t) % 11 - 5) / 8 for i in range(len(START))], np.float32)


# Made with PyTorch 2.13.0 (CPU): p = torch.tensor(START), p.grad = gradient(t) for t = 1..4, with the optimizer named
# in each comment, always lr=0.1 and weight_decay=0.01; printed with 9 digits.
PYTORCH: dict[
    str, tuple[list[float], dict[str, Any], list[float]]
] = {  # kind: (slots' initial values, settings, weights)
    # SGD()
    "sgd": ([], {}, [0.398115456, -1.14519489, 2.01707435, -0.0499625131, -0.734629273]),
    # SGD(momentum=0.9)
    "momentum": (
        [0.0],
        {"momentum": 0.9},
        [0.300082356, -0.98234731, 1.95731318, -0.0824603438, -0.635037661],
    ),
    # SGD(momentum=0.9, nesterov=True)
    "nesterov": (
        [0.0],
        {"momentum": 0.9},
        [0.218480662, -0.904836297, 1.97889519, -0.12409173, -0.631647229],
    ),
    # Adagrad(initial_accumulator_value=0.1, eps=1e-10)
    "adagrad": (
        [0.1],
        {"epsilon": 1e-10},
        [0.368331283, -1.11007881, 1.99748456, -0.05738746, -0.711508989],
    ),
    # RMSprop(alpha=0.9, eps=1e-8)
    "rmsprop": (
        [0.0],
        {"rho": 0.9, "epsilon": 1e-8},
        [-0.273720026, -0.75038904, 1.9629916, -0.03293854, -0.613127947],
    ),
    # Adam(betas=(0.9, 0.999), eps=1e-8)
    "adam": (
        [0.0, 0.0],
        {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
        [0.215614706, -0.966175675, 1.88945317, -0.00662903115, -0.586925864],
    ),
    # AdamW(betas=(0.9, 0.999), eps=1e-8)
    "adamw": (
        [0.0, 0.0],
        {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
        [0.315759242, -0.966858149, 1.89705718, -0.00654353201, -0.587829471],
    ),
}


@pytest.mark.parametrize("kernels", [fused, reference])
@pytest.mark.parametrize("kind", PYTORCH)
def test_four_steps_end_where_pytorch_does(kernels: Any, kind: str) -> None:
    initial, own, expected = PYTORCH[kind]
    weights = np.array(START, np.float32)
    slots = [np.full(len(START), value, np.float32) for value in initial]
    for t in range(1, STEPS + 1):
        counter = {"t": t} if kind.startswith("adam") else {}
        update(
            kernels,
            kind, weights, gradient(t), *slots,
            learning_rate=0.1, weight_decay=0.01, clip=math.inf, scale=1.0, **own, **counter,
        )  # fmt: skip
    np.testing.assert_allclose(weights, expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("kernels", [fused, reference])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_a_row_of_a_table_ends_where_pytorch_does_with_the_steps_that_it_had(kernels: Any, kind: str) -> None:
    _, own, expected = PYTORCH[kind]
    length = len(START)
    weights, slots = np.array([*START, *START], np.float32), np.zeros((2, 2 * length), np.float32)
    for t in range(1, STEPS + 1):  # the second row had seven pushes more
        both = np.concatenate([gradient(t), gradient(t)])
        update(
            kernels,
            kind, weights, both, *slots, learning_rate=0.1, weight_decay=0.01, clip=math.inf, scale=1.0,
            t=np.array([t, t + 7], np.uint32), **own,
        )  # fmt: skip
    np.testing.assert_allclose(weights[:length], expected, rtol=2e-6, atol=2e-7)
    assert not np.allclose(weights[length:], expected, rtol=1e-2)


@pytest.mark.parametrize("kernels", [fused, reference])
def test_rowwise_adagrad_of_rows_of_one_element_is_adagrad(kernels: Any) -> None:
    initial, own, expected = PYTORCH["adagrad"]
    settings = {"learning_rate": 0.1, "weight_decay": 0.01, "clip": math.inf, "scale": 1.0, **own}
    weights, sums = np.array(START, np.float32), np.full(len(START), initial[0], np.float32)
    for t in range(1, STEPS + 1):
        update(kernels, "rowwise_adagrad", weights, gradient(t), sums, **settings)
    np.testing.assert_allclose(weights, expected, rtol=2e-6, atol=2e-7)
