"""Mapping of optimizers of PyTorch, Keras and optax to parashard's that compute the same updates.

`tests/frameworks/test_optimizers_alike.py` compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from parashard.errors import ConfigurationError
from parashard.plan.optimizers import FTRL, LAMB, SGD, Adagrad, Adam, AdamW, Momentum, Nesterov, OptimizerSpec, RMSProp
from parashard.plan.schedules import (
    ConstantSchedule,
    CosineRestartsSchedule,
    CosineSchedule,
    ExponentialSchedule,
    PiecewiseSchedule,
    PolynomialSchedule,
    ScheduleOptions,
)

Settings = Mapping[str, Any]


class ClassMapping(NamedTuple):
    """The mapping of one class."""

    make: Callable[[Settings], OptimizerSpec]
    only: Mapping[str, Any] = {}
    """Settings of which only this value is supported."""


def number(given: Any) -> float:
    """Return a setting, a number or an array of one, as a float."""
    return float(given)


def _epsilon(given: Any) -> float:
    """Return an epsilon; 0 becomes 1e-30, the smallest allowed, which does not change a root other than 0."""
    return max(number(given), 1e-30)


def _moving(rate: Any, momentum: Any, nesterov: bool, **common: Any) -> OptimizerSpec:
    if not momentum:
        return SGD(number(rate), **common)
    return (Nesterov if nesterov else Momentum)(number(rate), momentum=number(momentum), **common)


def _adam(kind: type[OptimizerSpec], rate: Any, betas: Any, epsilon: Any, **common: Any) -> OptimizerSpec:
    beta1, beta2 = map(number, betas)
    return kind(number(rate), beta1=beta1, beta2=beta2, epsilon=_epsilon(epsilon), **common)


def _of(kind: type[OptimizerSpec]) -> Callable[[Settings], OptimizerSpec]:
    return lambda s: _adam(kind, s["lr"], s["betas"], s["eps"], weight_decay=number(s["weight_decay"]))


_TORCH: Mapping[str, ClassMapping] = {
    "SGD": ClassMapping(
        lambda s: _moving(s["lr"], s["momentum"], s["nesterov"], weight_decay=number(s["weight_decay"])),
        {"dampening": 0, "maximize": False},
    ),
    "Adam": ClassMapping(
        lambda s: _of(AdamW if s.get("decoupled_weight_decay") else Adam)(s), {"amsgrad": False, "maximize": False}
    ),
    "AdamW": ClassMapping(_of(AdamW), {"amsgrad": False, "maximize": False}),
    "Adagrad": ClassMapping(
        lambda s: Adagrad(
            s["lr"],
            weight_decay=s["weight_decay"],
            initial_accumulator=number(s["initial_accumulator_value"]),
            epsilon=_epsilon(s["eps"]),
        ),
        {"lr_decay": 0, "maximize": False},
    ),
    "RMSprop": ClassMapping(
        lambda s: RMSProp(
            s["lr"],
            weight_decay=s["weight_decay"],
            rho=number(s["alpha"]),
            epsilon=_epsilon(s["eps"]),
            momentum=number(s["momentum"]),
            centered=bool(s["centered"]),
        ),
        {"maximize": False},
    ),
}


def torch_spec(name: str, settings: Settings) -> OptimizerSpec:
    """Return the equivalent of `torch.optim.NAME` with these settings of a group."""
    return _mapped("torch.optim", _TORCH, name, settings)


def _keras_decay(settings: Settings) -> float:
    return number(settings["weight_decay"] or 0)


def _keras_adam(s: Settings) -> OptimizerSpec:
    """Map Adam; Keras adds epsilon before bias correction, where ours counts as epsilon * sqrt(1 - beta2^t)."""
    decay, betas = _keras_decay(s), (s["beta_1"], s["beta_2"])
    if decay:
        return _adam(AdamW, s["learning_rate"], betas, s["epsilon"], weight_decay=decay)
    return _adam(Adam, s["learning_rate"], betas, s["epsilon"])


def _keras_sgd(s: Settings) -> OptimizerSpec:
    """Map SGD; without momentum, decoupled decay, w - rate * decay * w, is the same as an L2 penalty."""
    decay = {"weight_decay": _keras_decay(s)}
    if s["momentum"]:
        decay |= {"decoupled_weight_decay": bool(_keras_decay(s)), "rate_in_velocity": True}
    return _moving(s["learning_rate"], s["momentum"], s["nesterov"], **decay)


def _decoupled(s: Settings) -> dict[str, Any]:
    decay = _keras_decay(s)
    return {"weight_decay": decay, "decoupled_weight_decay": True} if decay else {}


_KERAS: Mapping[str, ClassMapping] = {
    "SGD": ClassMapping(_keras_sgd),
    "Adam": ClassMapping(_keras_adam, {"amsgrad": False}),
    "AdamW": ClassMapping(_keras_adam, {"amsgrad": False}),
    # Keras has sqrt(a + epsilon): epsilon under the root is added to the initial sum of squares instead.
    "Adagrad": ClassMapping(
        lambda s: Adagrad(
            s["learning_rate"],
            initial_accumulator=number(s["initial_accumulator_value"]) + number(s["epsilon"]),
            epsilon=_epsilon(0),
            **_decoupled(s),
        ),
    ),
    "RMSprop": ClassMapping(
        lambda s: RMSProp(
            s["learning_rate"],
            rho=number(s["rho"]),
            epsilon=_epsilon(s["epsilon"]),
            epsilon_in_root=True,
            momentum=number(s["momentum"]),
            rate_in_velocity=True,
            centered=bool(s["centered"]),
            **_decoupled(s),
        ),
    ),
    "Ftrl": ClassMapping(
        lambda s: FTRL(
            s["learning_rate"],
            beta=_epsilon(s["beta"]),
            l1=number(s["l1_regularization_strength"]),
            l2=2 * number(s["l2_regularization_strength"]),
        ),
        {
            "weight_decay": None,
            "learning_rate_power": -0.5,
            "initial_accumulator_value": 0.0,
            "l2_shrinkage_regularization_strength": 0.0,
        },
    ),
    "Lamb": ClassMapping(
        lambda s: _adam(LAMB, s["learning_rate"], (s["beta_1"], s["beta_2"]), s["epsilon"], weight_decay=0.0),
        {"weight_decay": None},
    ),
}
_KERAS_COMMON = {"use_ema": False, "loss_scale_factor": None, "gradient_accumulation_steps": None}


def keras_spec(name: str, config: Settings) -> OptimizerSpec:
    """Return the equivalent of `keras.optimizers.NAME` with this configuration."""
    rate, schedule = _keras_rate(config["learning_rate"]) if name in _KERAS else (0.0, ConstantSchedule())
    settings = {**config, "learning_rate": rate, "weight_decay": config.get("weight_decay") or None}
    spec = _mapped("keras.optimizers", _KERAS, name, settings, _KERAS_COMMON)
    clips = {"variable_clip_norm": "clipnorm", "clip_norm": "global_clipnorm", "clip_value": "clipvalue"}
    given = {ours: number(config[theirs]) for ours, theirs in clips.items() if config.get(theirs)}
    return spec.replaced(schedule=schedule, **given)


def _keras_rate(given: Any) -> tuple[float, ScheduleOptions]:
    """Return the initial rate, and the schedule that multiplies it."""
    if not isinstance(given, Mapping):
        return float(str(np.float32(given))), ConstantSchedule()  # Keras has rounded it to float32
    name, settings = given["class_name"], given["config"]
    if name not in _KERAS_SCHEDULES:
        raise ConfigurationError(
            f"keras.optimizers.schedules.{name} has no equal here; allowed: {', '.join(_KERAS_SCHEDULES)}, or a "
            "schedule of parashard's"
        )
    return _KERAS_SCHEDULES[name](settings)


def _exponential(s: Settings) -> tuple[float, ScheduleOptions]:
    staircase = bool(s["staircase"])
    schedule = ExponentialSchedule(
        decay_steps=int(s["decay_steps"]), rate=number(s["decay_rate"]), staircase=staircase
    )  # fmt: skip
    return number(s["initial_learning_rate"]), schedule


def _cosine(s: Settings) -> tuple[float, ScheduleOptions]:
    rate = number(s["initial_learning_rate"])
    schedule = CosineSchedule(decay_steps=int(s["decay_steps"]), final_fraction=number(s["alpha"]))
    if s.get("warmup_target") is None:
        return rate, schedule
    target = number(s["warmup_target"])
    return target, schedule.replaced(warmup_steps=int(s["warmup_steps"]), warmup_from=rate / target)


def _restarts(s: Settings) -> tuple[float, ScheduleOptions]:
    return number(s["initial_learning_rate"]), CosineRestartsSchedule(
        first_steps=int(s["first_decay_steps"]),
        length_factor=number(s["t_mul"]),
        height_factor=number(s["m_mul"]),
        final_fraction=number(s["alpha"]),
    )


def _polynomial(s: Settings) -> tuple[float, ScheduleOptions]:
    if s["cycle"]:
        raise ConfigurationError("keras.optimizers.schedules.PolynomialDecay: cycle=True has no equal; allowed: False")
    rate = number(s["initial_learning_rate"])
    return rate, PolynomialSchedule(
        decay_steps=int(s["decay_steps"]),
        power=number(s["power"]),
        final_fraction=number(s["end_learning_rate"]) / rate,
    )


def _piecewise(s: Settings) -> tuple[float, ScheduleOptions]:
    values = [number(value) for value in s["values"]]
    first = next((value for value in values if value), 1.0)
    begins = [0, *(int(boundary) + 1 for boundary in s["boundaries"])]  # the step at a boundary has the old value
    changes = tuple((begin, value / first) for begin, value in zip(begins, values, strict=True))
    return first, PiecewiseSchedule(changes=changes)


_KERAS_SCHEDULES: Mapping[str, Callable[[Settings], tuple[float, ScheduleOptions]]] = {
    "ExponentialDecay": _exponential,
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _restarts,
    "PolynomialDecay": _polynomial,
    "PiecewiseConstantDecay": _piecewise,
}


def _optax_betas(s: Settings) -> tuple[Any, Any]:
    return s["b1"], s["b2"]


_OPTAX: Mapping[str, ClassMapping] = {
    "sgd": ClassMapping(
        lambda s: _moving(s["learning_rate"], s["momentum"], s["nesterov"]), {"accumulator_dtype": None}
    ),
    "adam": ClassMapping(
        lambda s: _adam(Adam, s["learning_rate"], _optax_betas(s), s["eps"]),
        {"eps_root": 0, "mu_dtype": None, "nesterov": False},
    ),
    "adamw": ClassMapping(
        lambda s: _adam(AdamW, s["learning_rate"], _optax_betas(s), s["eps"], weight_decay=number(s["weight_decay"])),
        {"eps_root": 0, "mu_dtype": None, "nesterov": False, "mask": None},
    ),
    "adagrad": ClassMapping(
        lambda s: Adagrad(
            number(s["learning_rate"]),
            initial_accumulator=number(s["initial_accumulator_value"]) + number(s["eps"]),
            epsilon=_epsilon(0),
        )
    ),
    "rmsprop": ClassMapping(
        lambda s: RMSProp(
            number(s["learning_rate"]),
            rho=number(s["decay"]),
            epsilon=_epsilon(s["eps"]),
            epsilon_in_root=bool(s["eps_in_sqrt"]),
            momentum=number(s["momentum"] or 0),
            rate_in_velocity=True,
            centered=bool(s["centered"]),
        ),
        {"initial_scale": 0, "nesterov": False, "bias_correction": False},
    ),
    "lamb": ClassMapping(
        lambda s: _adam(LAMB, s["learning_rate"], _optax_betas(s), s["eps"], weight_decay=number(s["weight_decay"])),
        {"eps_root": 0, "mask": None},
    ),
}


def optax_spec(name: str, settings: Settings) -> OptimizerSpec:
    """Return the equivalent of `optax.NAME(**settings)`; raise ConfigurationError if there is none."""
    for key in ("learning_rate", "weight_decay"):
        if callable(settings.get(key)):
            raise ConfigurationError(
                f"optax.{name}: {key} is a function, which does not tell what it computes; give a number, or "
                'ps.Adam(1e-3, schedule={"kind": "cosine", "decay_steps": 1000}) or another of parashard\'s schedules'
            )
    return _mapped("optax", _OPTAX, name, settings)


def _mapped(
    place: str,
    table: Mapping[str, ClassMapping],
    name: str,
    settings: Settings,
    common: Mapping[str, Any] | None = None,
) -> OptimizerSpec:
    if name not in table:
        raise ConfigurationError(f"{place}.{name} has no equal in parashard; allowed: {', '.join(sorted(table))}")
    rule = table[name]
    for key, due in {**rule.only, **(common or {})}.items():
        if settings.get(key, due) != due:
            raise ConfigurationError(
                f"{place}.{name}: {key}={settings[key]!r} has no equal in parashard; allowed: {key}={due!r}"
            )
    return rule.make(settings)
