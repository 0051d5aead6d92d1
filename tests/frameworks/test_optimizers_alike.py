"""Optimizers of PyTorch, Keras and optax beside parashard's that the table calls equal: 20 steps, equal gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.optimizers import optimizer_of
from parashard.errors import ConfigurationError
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.variables import Variable
from parashard_server.state.optimizer import Optimizer
from support import reference_rules as reference

STEPS = 20
RELATIVE = 1e-5
"""Of how far a weight has moved, besides some roundings of the weight itself."""
LATER = pytest.importorskip  # a framework is imported by the tests that need it


def gradients(size: float = 1.0) -> list[np.ndarray]:
    """Return gradients that differ in size and sign, with zeros in between."""
    rng = np.random.default_rng(0)
    return [
        (size * rng.normal(size=12) * np.logspace(-1, 1, 12) * (rng.random(12) > 0.2)).astype(np.float32)
        for _ in range(STEPS)
    ]


def first() -> np.ndarray:
    return np.random.default_rng(1).normal(size=12).astype(np.float32)


def ours(spec: OptimizerSpec, given: list[np.ndarray]) -> np.ndarray:
    weights, optimizer = first(), Optimizer(spec.resolved(STEPS), reference)
    slots = {name: np.full(12, optimizer.initial_values[name], np.float32) for name in optimizer.slots}
    for step, gradient in enumerate(given):
        norm = np.linalg.norm(gradient)
        bounds = [bound for bound in (spec.clip_norm, spec.variable_clip_norm) if bound is not None]
        factor = min([1.0, *(bound / norm for bound in bounds)])  # as a worker does
        optimizer.update(
            weights,
            gradient * np.float32(factor),
            slots,
            t=step + 1,
            scale=1.0,
            variable=Variable("w", (12,)),
        )
    return weights


def of_torch(make: Callable[..., Any], given: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    torch = LATER("torch", reason="NO TEST OF PyTorch's OPTIMIZERS: it is not installed; `make test-frameworks` has it")
    weights = torch.nn.Parameter(torch.tensor(first()))
    optimizer = make(torch.optim)([weights])
    mapped = optimizer_of(optimizer)
    for gradient in given:
        weights.grad = torch.tensor(gradient)
        optimizer.step()
    return mapped, weights.detach().numpy()


def of_keras(make: Callable[..., Any], given: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = LATER("keras", reason="NO TEST OF KERAS' OPTIMIZERS: it is not installed; `make test-frameworks` has it")
    weights = keras.Variable(first())
    optimizer = make(keras.optimizers)
    mapped = optimizer_of(optimizer)
    for gradient in given:
        optimizer.apply_gradients([(keras.ops.convert_to_tensor(gradient), weights)])
    return mapped, keras.ops.convert_to_numpy(weights)


def of_optax(make: Callable[..., Any], given: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    optax = LATER("optax", reason="NO TEST OF optax: it is not installed; `make test-frameworks` has it")
    call = make(optax)
    transformation, weights = call(), first()
    state = transformation.init(weights)
    for gradient in given:
        updates, state = transformation.update(gradient, state, weights)
        weights = optax.apply_updates(weights, updates)
    return optimizer_of(call), np.asarray(weights)


TORCH: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda o: partial(o.SGD, lr=0.1),
    "SGD, decay": lambda o: partial(o.SGD, lr=0.1, weight_decay=0.1),
    "momentum": lambda o: partial(o.SGD, lr=0.01, momentum=0.8, weight_decay=0.1),
    "Nesterov": lambda o: partial(o.SGD, lr=0.01, momentum=0.8, nesterov=True, weight_decay=0.1),
    "Adam": lambda o: partial(o.Adam, lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
    "Adam, defaults": lambda o: o.Adam,
    "Adam, decoupled": lambda o: partial(o.Adam, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW": lambda o: partial(o.AdamW, lr=0.01, weight_decay=0.1),
    "AdamW, defaults": lambda o: o.AdamW,
    "Adagrad": lambda o: partial(o.Adagrad, lr=0.1, initial_accumulator_value=0.2, eps=1e-3, weight_decay=0.1),
    "Adagrad, defaults": lambda o: o.Adagrad,
    "RMSprop": lambda o: partial(o.RMSprop, lr=0.01, alpha=0.8, eps=1e-3, weight_decay=0.1),
    "RMSprop, defaults": lambda o: o.RMSprop,
    "RMSprop, momentum": lambda o: partial(o.RMSprop, lr=0.01, momentum=0.8, eps=1e-3, weight_decay=0.1),
    "RMSprop, centered": lambda o: partial(o.RMSprop, lr=0.01, centered=True, eps=1e-3),
    "RMSprop, both": lambda o: partial(o.RMSprop, lr=0.01, centered=True, momentum=0.5, eps=1e-3),
}
KERAS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda o: o.SGD(0.1),
    "SGD, decay": lambda o: o.SGD(0.1, weight_decay=0.1),
    "momentum": lambda o: o.SGD(0.01, momentum=0.8),
    "Nesterov": lambda o: o.SGD(0.01, momentum=0.8, nesterov=True),
    "momentum, decay": lambda o: o.SGD(0.01, momentum=0.8, weight_decay=0.1),
    "momentum, schedule": lambda o: o.SGD(o.schedules.ExponentialDecay(0.02, 3, 0.5), momentum=0.8),
    "Nesterov, both": lambda o: o.SGD(
        o.schedules.ExponentialDecay(0.02, 3, 0.5), momentum=0.8, nesterov=True, weight_decay=0.1
    ),
    "clipvalue": lambda o: o.SGD(0.1, clipvalue=0.5),
    "global_clipnorm": lambda o: o.SGD(0.1, global_clipnorm=0.5),
    "clipnorm": lambda o: o.Adam(0.1, clipnorm=0.5, epsilon=1e-10),
    "CosineDecay, warm-up": lambda o: o.SGD(o.schedules.CosineDecay(0.0, 10, 0.1, warmup_target=0.1, warmup_steps=5)),
    "CosineDecayRestarts": lambda o: o.SGD(o.schedules.CosineDecayRestarts(0.1, 3, t_mul=1.5, m_mul=0.8, alpha=0.1)),
    "CosineDecayRestarts, equal": lambda o: o.SGD(o.schedules.CosineDecayRestarts(0.1, 4, t_mul=1.0)),
    "PolynomialDecay": lambda o: o.SGD(o.schedules.PolynomialDecay(0.1, 12, 0.01, power=2.0)),
    "PiecewiseConstantDecay": lambda o: o.SGD(o.schedules.PiecewiseConstantDecay([3, 7], [0.1, 0.02, 0.05])),
    "PiecewiseConstantDecay, 0": lambda o: o.SGD(o.schedules.PiecewiseConstantDecay([3, 7], [0.0, 0.1, 0.05])),
    "ExponentialDecay": lambda o: o.SGD(o.schedules.ExponentialDecay(0.1, 7, 0.5)),
    "ExponentialDecay, staircase": lambda o: o.SGD(o.schedules.ExponentialDecay(0.1, 7, 0.5, staircase=True)),
    "CosineDecay": lambda o: o.Adam(o.schedules.CosineDecay(0.1, 15, alpha=0.1), epsilon=1e-10),
    "Adam": lambda o: o.Adam(0.01, beta_1=0.8, beta_2=0.9, epsilon=1e-10),
    "Adam, decay": lambda o: o.Adam(0.01, weight_decay=0.1, epsilon=1e-10),
    "AdamW": lambda o: o.AdamW(0.01, weight_decay=0.1, epsilon=1e-10),
    "Adagrad": lambda o: o.Adagrad(0.1, epsilon=1e-2),
    "Adagrad, defaults": lambda o: o.Adagrad(),
    "Adagrad, decay": lambda o: o.Adagrad(0.1, weight_decay=0.1),
    "RMSprop": lambda o: o.RMSprop(0.01, rho=0.8, epsilon=1e-3),
    "RMSprop, defaults": lambda o: o.RMSprop(),
    "RMSprop, decay": lambda o: o.RMSprop(0.01, weight_decay=0.1),
    "RMSprop, momentum": lambda o: o.RMSprop(0.01, momentum=0.8),
    "RMSprop, centered": lambda o: o.RMSprop(0.01, centered=True, epsilon=1e-3),
    "RMSprop, all": lambda o: o.RMSprop(
        o.schedules.ExponentialDecay(0.02, 3, 0.5), momentum=0.8, centered=True, epsilon=1e-3, weight_decay=0.1
    ),
    "Ftrl": lambda o: o.Ftrl(
        0.1,
        initial_accumulator_value=0.0,
        l1_regularization_strength=0.05,
        l2_regularization_strength=0.3,
        beta=0.5,
    ),
    "Lamb": lambda o: o.Lamb(0.01),
}
OPTAX: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda o: partial(o.sgd, 0.1),
    "momentum": lambda o: partial(o.sgd, 0.01, momentum=0.8),
    "Nesterov": lambda o: partial(o.sgd, 0.01, 0.8, True),
    "adam": lambda o: partial(o.adam, 0.01, b1=0.8, eps=1e-4),
    "adam, defaults": lambda o: partial(o.adam, 1e-3),
    "adamw": lambda o: partial(o.adamw, 0.01, weight_decay=0.1),
    "adamw, defaults": lambda o: partial(o.adamw, 1e-3),
    "adagrad": lambda o: partial(o.adagrad, 0.1, eps=1e-2),
    "adagrad, defaults": lambda o: partial(o.adagrad, 0.1),
    "rmsprop": lambda o: partial(o.rmsprop, 0.01, decay=0.8, eps=1e-3, eps_in_sqrt=False),
    "rmsprop, defaults": lambda o: partial(o.rmsprop, 0.01),
    "rmsprop, momentum": lambda o: partial(o.rmsprop, 0.01, momentum=0.8),
    "rmsprop, centered": lambda o: partial(o.rmsprop, 0.01, centered=True, eps=1e-3),
    "lamb": lambda o: partial(o.lamb, 0.01, weight_decay=0.1),
}
CASES = [
    *((f"torch {name}", of_torch, make) for name, make in TORCH.items()),
    *((f"keras {name}", of_keras, make) for name, make in KERAS.items()),
    *((f"optax {name}", of_optax, make) for name, make in OPTAX.items()),
]


@pytest.mark.parametrize(("name", "run", "make"), CASES, ids=[name for name, _, _ in CASES])
def test_twenty_steps_lead_to_the_same_weights(name: str, run: Any, make: Any) -> None:
    given = gradients()
    mapped, due = run(make, given)
    moved = np.abs(due - first())
    assert moved.max() > 1e-3
    apart = np.abs(ours(mapped.spec, given) - due)
    assert np.all(apart <= RELATIVE * moved + STEPS * np.spacing(np.abs(first()).max()))


def test_the_epsilon_of_keras_adam_stands_elsewhere_and_matters_for_small_gradients_and_first_steps() -> None:
    def parting(size: float, epsilon: float) -> float:
        given = gradients(size)
        mapped, due = of_keras(lambda o: o.Adam(0.01, epsilon=epsilon), given)
        return float(np.max(np.abs(ours(mapped.spec, given) - due)))

    assert parting(1.0, 1e-7) < 1e-5, "of weights that move by 0.1"
    assert parting(1e-4, 1e-7) > 1e-3
    assert parting(1e-4, 1e-14) < 1e-6


def test_groups_of_a_module_s_parameters_are_settings_of_its_variables() -> None:
    torch = LATER("torch", reason="NO TEST OF PyTorch's GROUPS: it is not installed; `make test-frameworks` has it")
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    net[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": [net[0].weight, net[1].weight]},
            {"params": [net[0].bias], "weight_decay": 0.0},
            {"params": net[2].parameters(), "lr": 1e-4},
        ],
        lr=1e-3,
    )
    for module, made in ((net, optimizer), (net, torch.optim.AdamW(net.parameters())), (type(net), optimizer)):
        model = ps.torch.Model(module if module is net else lambda: net, torch.nn.functional.mse_loss)
        trainer = ps.Trainer(model, made)
        if module is not net:
            with pytest.raises(ConfigurationError, match="parameters are not those of the model"):
                trainer._present.variable_settings(trainer._optimizer.mapped)
        elif made is optimizer:
            assert trainer._present.variable_settings(trainer._optimizer.mapped) == {
                "0.bias": {"decay": False},
                "1.bias": {"frozen": True},
                "2.weight": {"learning_rate_factor": 0.1},
            }
        else:
            assert trainer._present.variable_settings(trainer._optimizer.mapped) == {}
