"""The layers and losses of parashard compute what PyTorch's of the same name do, with the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.layers.losses import mean_squared_error, sigmoid_cross_entropy, softmax_cross_entropy

torch = pytest.importorskip(
    "torch", reason="NO TEST OF ps.layers AGAINST PyTorch: it is not installed; `make test-frameworks` has it"
)
functional = torch.nn.functional
L = ps.layers
RNG = np.random.default_rng(3)


def conv(x: Any, weight: Any, bias: Any) -> Any:
    kernel = weight.reshape(3, 3, 2, 4).permute(3, 2, 0, 1)
    return functional.conv2d(x.permute(0, 3, 1, 2), kernel, bias, padding="same").permute(0, 2, 3, 1)


def pool(x: Any) -> Any:
    return functional.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


CASES: dict[str, tuple[Any, tuple[int, ...], Callable[..., Any]]] = {
    "dense": (L.Dense(3), (5, 4), lambda x, weight, bias: functional.linear(x, weight.T, bias)),
    "conv": (L.Conv2D(4), (6, 5, 2), conv),
    "pool": (L.MaxPool2D(), (6, 5, 2), pool),
    "norm": (L.LayerNorm(1e-3), (5, 4), lambda x, weight, bias: functional.layer_norm(x, (4,), weight, bias, 1e-3)),
    "relu": (L.ReLU(), (7,), functional.relu),
    "gelu": (L.GELU(), (7,), lambda x: functional.gelu(x, approximate="tanh")),
    "tanh": (L.Tanh(), (7,), torch.tanh),
    "sigmoid": (L.Sigmoid(), (7,), torch.sigmoid),
    "embedding": (L.Embedding(5, 3), (4,), functional.embedding),
}


@pytest.mark.parametrize(("layer", "shape", "theirs"), CASES.values(), ids=CASES.keys())
def test_a_layer_is_that_of_pytorch(layer: Any, shape: Any, theirs: Any) -> None:
    x = RNG.integers(0, 5, (6, *shape)) if layer.of_indices else RNG.normal(size=(6, *shape))
    weights = {name: RNG.normal(size=variable.shape) for name, variable in layer.variables(shape).items()}
    inputs = torch.tensor(x, requires_grad=not layer.of_indices)
    tensors = {name: torch.tensor(values, requires_grad=True) for name, values in weights.items()}
    due = theirs(inputs, **tensors)
    output, pull_back = layer.apply(weights, x, L.Pass(np))
    towards = RNG.normal(size=output.shape)
    due.backward(torch.tensor(towards))
    by_input, gradients = pull_back(towards.copy(), not layer.of_indices)
    np.testing.assert_allclose(output, due.detach().numpy(), rtol=1e-10, atol=1e-12)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(gradients[name], tensor.grad.numpy(), rtol=1e-9, atol=1e-11, err_msg=name)
    if not layer.of_indices:
        np.testing.assert_allclose(by_input, inputs.grad.numpy(), rtol=1e-9, atol=1e-11)


LOSSES = {
    "softmax": (softmax_cross_entropy, functional.cross_entropy, RNG.integers(0, 4, 6)),
    "sigmoid": (sigmoid_cross_entropy, functional.binary_cross_entropy_with_logits, RNG.random((6, 4))),
    "squares": (mean_squared_error, functional.mse_loss, RNG.normal(size=(6, 4))),
}


@pytest.mark.parametrize(("loss", "theirs", "targets"), LOSSES.values(), ids=LOSSES.keys())
def test_a_loss_is_that_of_pytorch(loss: Any, theirs: Any, targets: Any) -> None:
    outputs = RNG.normal(size=(6, 4))
    tensor = torch.tensor(outputs, requires_grad=True)
    due = theirs(tensor, torch.tensor(targets))
    due.backward()
    found, gradient = loss(outputs, targets, np)
    assert float(found) == pytest.approx(due.item(), rel=1e-12)
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-10, atol=1e-14)
