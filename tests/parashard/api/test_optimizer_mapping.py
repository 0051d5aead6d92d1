"""What a trainer makes of other frameworks' optimizers: their settings, groups and names; what has no equal is refused.

The frameworks are not needed: objects of the same shape take their place, and `tests/frameworks/` has the real ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

import parashard as ps
from parashard.api.optimizer_table import keras_spec, optax_spec, torch_spec
from parashard.api.optimizers import optimizer_of, variable_settings
from parashard.errors import ConfigurationError
from parashard.plan.optimizers import OptimizerSpec

ADAM = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 0, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "weight_decay": 0.0, "maximize": False}
OF_KERAS = {"learning_rate": 0.0010000000474974513, "weight_decay": None, "clipnorm": None, "epsilon": 1e-7}
KERAS_ADAM = {**OF_KERAS, "beta_1": 0.9, "beta_2": 0.999, "amsgrad": False}
KERAS_SGD = {**OF_KERAS, "momentum": 0.0, "nesterov": False}
OPTAX = {"learning_rate": 0.1, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "eps_root": 0.0, "mu_dtype": None, "nesterov": False}


class Torch:
    """An optimizer of PyTorch, by what of it is looked at."""

    def __init__(self, *groups: Mapping[str, Any], **common: Any) -> None:
        self.param_groups = [{**common, **group} for group in groups]


Torch.__module__, Torch.__qualname__, Torch.__name__ = "torch.optim.adam", "Adam", "Adam"
A, B, C = object(), object(), object()
NAMES = {id(A): "a", id(B): "b", id(C): "c"}


def settings(optimizer: Any, names: Mapping[int, str] = NAMES, frozen: Any = ()) -> Any:
    trained = [name for name in "abc" if name not in frozen]
    return variable_settings(optimizer_of(optimizer).groups, names, trained, frozen)


def plain(spec: OptimizerSpec) -> dict[str, Any]:
    return {name: value for name, value in spec.plain().items() if value is not None}


def test_one_of_parashard_s_is_itself() -> None:
    spec = ps.Adam(1e-3)
    assert optimizer_of(spec).spec is spec


def test_settings_become_those_of_the_same_meaning() -> None:
    adam = plain(torch_spec("Adam", ADAM))
    assert {key: adam[key] for key in ("kind", "learning_rate", "beta1", "beta2", "epsilon", "weight_decay")} == {
        "kind": "adam",
        "learning_rate": 0.01,
        "beta1": 0.8,
        "beta2": 0.9,
        "epsilon": 1e-30,
        "weight_decay": 0.1,
    }
    assert torch_spec("Adam", {**ADAM, "decoupled_weight_decay": True}).kind == "adamw"
    assert [torch_spec("SGD", {**SGD, **more}).kind for more in ({}, {"nesterov": True}, {"momentum": 0})] == [
        "momentum",
        "nesterov",
        "sgd",
    ]
    assert keras_spec("Adam", KERAS_ADAM).learning_rate == 0.001, "what was written, before Keras rounded it"
    assert keras_spec("Adam", {**KERAS_ADAM, "weight_decay": 0.1}).kind == "adamw"
    clipped = keras_spec("SGD", {**KERAS_SGD, "global_clipnorm": 2.0})
    assert (clipped.clip_norm, clipped.clip_value) == (2.0, None)


def test_groups_become_factors_and_no_decay() -> None:
    optimizer = Torch(
        {"params": [A], "lr": 0.01, "weight_decay": 0.1},
        {"params": [B], "lr": 0.05, "weight_decay": 0.0},
        {"params": [C], "lr": 0.0, "weight_decay": 0.1},
        **{key: ADAM[key] for key in ADAM.keys() - {"lr", "weight_decay"}},
    )
    spec = optimizer_of(optimizer).spec
    assert (spec.learning_rate, spec.weight_decay) == (0.01, 0.1)
    assert settings(optimizer) == {
        "b": {"learning_rate_factor": 5.0, "decay": False},
        "c": {"learning_rate_factor": 0.0},
    }


def test_a_parameter_in_no_group_is_frozen() -> None:
    assert settings(Torch({"params": [A, C]}, **ADAM)) == {"b": {"frozen": True}}
    assert settings(Torch({"params": [A, B, C]}, **ADAM), frozen=["b"]) == {}


def test_parameters_are_known_by_name_or_by_being_the_model_s_own() -> None:
    named = Torch({"params": [object(), object()], "param_names": ["c", "a"]}, **ADAM)
    assert settings(named, names={}) == {"b": {"frozen": True}}
    copied = Torch({"params": [object()] * 3}, **ADAM)
    assert settings(copied, names={}) == {}, "all of a copy, by their number"
    for other in (
        Torch({"params": [object()]}, **ADAM),
        Torch({"params": [object()], "lr": 1.0}, {"params": [object()] * 2}, **ADAM),
        Torch({"params": [object()], "param_names": ["z"]}, **ADAM),
    ):
        with pytest.raises(ConfigurationError, match="the optimizer's parameters are not those of the model"):
            settings(other, names={})


def keras(name: str, config: Mapping[str, Any], **more: Any) -> Any:
    return keras_spec(name, {**config, **more})


def decaying(name: str, **config: Any) -> Any:
    return {"class_name": name, "config": {"initial_learning_rate": 0.1, "decay_steps": 9, **config}}


def transformation() -> None:
    """What optax returns, by its module."""


transformation.__module__ = "optax._src.base"
REFUSED: dict[str, tuple[Any, str]] = {
    "none": (lambda: optimizer_of("adam"), "the shards run the optimizer: it is one of parashard's"),
    "amsgrad": (lambda: torch_spec("Adam", {**ADAM, "amsgrad": True}), "torch.optim.Adam: amsgrad=True has no equal"),
    "maximize": (lambda: torch_spec("SGD", {**SGD, "maximize": True}), "allowed: maximize=False"),
    "dampening": (lambda: torch_spec("SGD", {**SGD, "dampening": 0.5}), "dampening=0.5"),
    "NAdam": (lambda: torch_spec("NAdam", {}), "torch.optim.NAdam has no equal in parashard; allowed: Adagrad, Adam, "),
    "a scheduler": (
        lambda: optimizer_of(Torch({"params": [A], "initial_lr": 0.1}, **ADAM)),
        "torch.optim.Adam has a learning-rate scheduler, which the shards do not run",
    ),
    "betas of a group": (
        lambda: optimizer_of(Torch({"params": [A]}, {"params": [B], "betas": (0.5, 0.5)}, **ADAM)),
        "torch.optim.Adam: groups with different betas have no equal",
    ),
    "decays": (
        lambda: optimizer_of(Torch({"params": [A]}, {"params": [B], "weight_decay": 0.2}, **ADAM)),
        "groups with weight_decay 0.1, 0.2 have no equal here; allowed is one value, and 0",
    ),
    "keras amsgrad": (lambda: keras("Adam", KERAS_ADAM, amsgrad=True), "keras.optimizers.Adam: amsgrad=True"),
    "keras average": (lambda: keras("Adam", KERAS_ADAM, use_ema=True), "use_ema=True"),
    "keras Nadam": (lambda: keras("Nadam", OF_KERAS), "keras.optimizers.Nadam has no equal"),
    "keras inverse time": (
        lambda: keras("SGD", KERAS_SGD, learning_rate=decaying("InverseTimeDecay")),
        "keras.optimizers.schedules.InverseTimeDecay has no equal here; allowed: ExponentialDecay, CosineDecay",
    ),
    "keras polynomial": (
        lambda: keras("SGD", KERAS_SGD, learning_rate=decaying("PolynomialDecay", cycle=True)),
        "PolynomialDecay: cycle=True has no equal",
    ),
    "optax": (lambda: optimizer_of(transformation), "an optax transformation does not tell what it computes"),
    "optax eps_root": (lambda: optax_spec("adam", {**OPTAX, "eps_root": 1e-3}), "optax.adam: eps_root=0.001"),
    "optax schedule": (
        lambda: optax_spec("adam", {**OPTAX, "learning_rate": lambda count: 0.1}),
        "optax.adam: learning_rate is a function",
    ),
    "optax lion": (lambda: optax_spec("lion", OPTAX), "optax.lion has no equal in parashard; allowed: adagrad, adam"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_equal_is_refused_by_name(case: str) -> None:
    make, says = REFUSED[case]
    with pytest.raises(ConfigurationError) as refused:
        make()
    assert says in refused.value.message


def test_a_call_of_optax_is_read_with_its_defaults() -> None:
    def sgd(learning_rate: float, momentum: float | None = None, nesterov: bool = False) -> None:
        raise AssertionError("it is not called")

    sgd.__module__ = "optax._src.alias"
    spec = optimizer_of(partial(sgd, 0.1, nesterov=True, momentum=0.5)).spec
    assert (spec.kind, spec.learning_rate, plain(spec)["momentum"]) == ("nesterov", 0.1, 0.5)
    with pytest.raises(ConfigurationError, match=r"optax\.sgd: missing a required argument: 'learning_rate'"):
        optimizer_of(partial(sgd))
