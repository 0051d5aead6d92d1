"""Optimizer specifications: which update rule a job uses, and its settings.

Every bound keeps its setting an ordinary number in float32, which the kernels compute in: no epsilon that rounds to
zero, no rate that rounds to infinity.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError

from parashard.errors import ConfigurationError
from parashard.frozen_model import FrozenModel, first_problem, setting
from parashard.plan.schedules import ConstantSchedule, ScheduleOptions

SLOT_NAMES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("velocity",),
    "nesterov": ("velocity",),
    "adagrad": ("accumulator",),
    "rowwise_adagrad": ("accumulator",),
    "rmsprop": ("mean_square",),
    "rmsprop_momentum": ("mean_square", "velocity"),
    "rmsprop_centered": ("mean_square", "mean", "velocity"),
    "adam": ("m", "v"),
    "adamw": ("m", "v"),
    "ftrl": ("z", "n"),
    "lamb": ("m", "v"),
}
"""Slots of each rule: vectors of the weights' length (of `rowwise_adagrad`: a number for each row)."""

_NAMES_ELSEWHERE = {
    "lr": "learning_rate",
    "eps": "epsilon",
    "alpha": "rho",
    "betas": "beta1 and beta2",
    "beta_1": "beta1",
    "beta_2": "beta2",
    "clipvalue": "clip_value",
    "global_clipnorm": "clip_norm",
    "clipnorm": "variable_clip_norm",
}
"""Our name of each setting that other libraries name differently."""

_LATER = {
    "momentum": ("decoupled_weight_decay", "rate_in_velocity"),
    "nesterov": ("decoupled_weight_decay", "rate_in_velocity"),
    "adagrad": ("decoupled_weight_decay",),
    "rmsprop": ("decoupled_weight_decay", "rate_in_velocity", "epsilon_in_root", "momentum", "centered"),
}
"""Settings that earlier versions lacked; at their default they are not in the digest, so that old jobs keep theirs."""

REMOVED_SETTINGS = {"staleness_damping": "none", "delay_compensation": 0.0}
"""Removed settings. Records and digests of earlier jobs have these values, which turned them off."""
WHY_REMOVED = 'it was removed, because measurements show that it does not keep accuracy; use consistency "auto"'

_NOT_GIVEN: Any = object()
_LARGEST = 1e15  # the product of two settings still fits float32
_SMALLEST = 1e-30


def _bounded(least: float, *, either_sign: bool = False, or_zero: bool = False) -> AfterValidator:
    """Return a check of least <= x <= 1e15 (of |x|, with `either_sign`), whose message shows powers of ten as such."""
    allowed = f"{'0, or ' if or_zero else ''}between {least:g} and {_LARGEST:g}"
    if either_sign:
        allowed += " or the negative of such a number (which ascends)"

    def check(value: float) -> float:
        if not least <= (abs(value) if either_sign else value) <= _LARGEST and not (or_zero and value == 0):
            raise ValueError(f"must be {allowed}, found {value!r}")
        return value

    return AfterValidator(check)


Positive = Annotated[float, _bounded(_SMALLEST)]
Rate = Annotated[float, _bounded(_SMALLEST, or_zero=True)]
EitherRate = Annotated[float, _bounded(_SMALLEST, either_sign=True, or_zero=True)]
NonNegative = Annotated[float, _bounded(0.0)]
Decay = Annotated[float, Field(ge=0, lt=1)]

# Settings that several rules share, with their descriptions for the job file's reference.
_Rate = Annotated[Rate, Field(description="Step size; the schedule multiplies it.")]
_Inertia = Annotated[Decay, Field(description="Share of the velocity that an update keeps.")]
_Beta1 = Annotated[Decay, Field(description="Decay of the gradient's running mean.")]
_Beta2 = Annotated[Decay, Field(description="Decay of the squared gradient's running mean.")]
_Epsilon = Annotated[Positive, Field(description="Added to the denominator against division by zero.")]
_Coupled = Annotated[
    NonNegative, Field(description="L2 penalty: this times w is added to the scaled and clipped gradient.")
]
_Decoupled = Annotated[NonNegative, Field(description="Decoupled weight decay: not part of the gradient.")]


class OptimizerSpec(FrozenModel):
    """What all optimizers share.

    Parameters
    ----------
    learning_rate : float
        >= 0; for `sgd` any number (a negative one ascends, as the ledger job does). At 0 weights stay as they are.
    weight_decay : float
        >= 0. An L2 penalty: weight_decay * w is added to the gradient, after it is scaled and clipped. In `adamw` and
        `lamb` it is decoupled from the gradient. Variables with `decay=False` have none.
    schedule : ScheduleOptions
        Multiplies the learning rate.
    clip_value : float or None
        Bound of every element of the gradient, applied by the shard; None: off.
    clip_norm : float or None
        Bound of the norm of the whole gradient over all variables; None: off. Applied by the worker before the push,
        because no shard sees the whole gradient.
    variable_clip_norm : float or None
        Bound of the norm of each variable's gradient, and of that of each table's rows; None: off. Applied before
        `clip_norm`, by the worker.
    """

    kind: str = Field(description="Names the update rule.")
    learning_rate: _Rate = setting(kw_only=False)

    weight_decay: _Coupled = 0.0
    schedule: ScheduleOptions = Field(
        default_factory=ConstantSchedule, description="Multiplies the learning rate over time."
    )
    clip_value: Positive | None = Field(default=None, description="Bound of each element of the gradient; unset: off.")
    clip_norm: Positive | None = Field(
        default=None,
        description="Bound of the whole gradient's norm; unset: off.",
    )
    variable_clip_norm: Positive | None = Field(
        default=None,
        description="Bound of the norm of each variable's gradient; unset: off.",
    )

    def __init__(self, learning_rate: Any = _NOT_GIVEN, *others: Any, **settings: Any) -> None:
        known = [name for name in type(self).model_fields if name != "kind"]
        own, allowed = f"ps.{type(self).__name__}", f"allowed: {', '.join(known)}"
        if others:
            raise ConfigurationError(f"{own} takes its learning rate first and all else by name; {allowed}")
        for name in settings.keys() - type(self).model_fields.keys():
            if name in REMOVED_SETTINGS:
                raise ConfigurationError(f"{own} has no {name}=; {WHY_REMOVED}")
            here = _NAMES_ELSEWHERE.get(name, "")
            hint = f"it is {here} here; " if here in known or " and " in here else ""
            hint = "ps.Momentum has it; " if name == "momentum" else hint
            raise ConfigurationError(f"{own} has no {name}=; {hint}{allowed}")
        if learning_rate is not _NOT_GIVEN:
            settings = {"learning_rate": learning_rate, **settings}
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigurationError(f"{own}: {first_problem(error)}") from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic: validate files without it

    @property
    def rule(self) -> str:
        """Name of the kernels' update rule for these settings."""
        return self.kind

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the rule's slots."""
        return SLOT_NAMES[self.rule]

    @property
    def requires_unsplit_variables(self) -> bool:
        """Whether an update needs a norm over a whole variable, so that no partition may cut it."""
        return False

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the arithmetic; later versions' settings only if they differ from default."""
        plain = self.plain() | REMOVED_SETTINGS
        for name in ("variable_clip_norm", *_LATER.get(self.kind, ())):
            if plain[name] == type(self).model_fields[name].default:
                del plain[name]
        if plain["schedule"].get("warmup_from", 0) is None:
            plain["schedule"] = {name: value for name, value in plain["schedule"].items() if name != "warmup_from"}
        return plain

    def resolved(self, total_steps: int) -> Self:
        """Return the spec with its schedule's lengths in concrete numbers (see `Schedule.resolved`)."""
        return self.replaced(schedule=self.schedule.resolved(total_steps))


class _Coupling(OptimizerSpec):
    """Rules whose weight decay may be a part of the gradient, or w <- w - rate * weight_decay * w before the update."""

    decoupled_weight_decay: bool = Field(
        default=False, description="True: decoupled, as in Keras; false: an L2 penalty."
    )


class _Moving(_Coupling):
    """Rules with momentum: as PyTorch's or as Keras' they differ where the rate changes."""

    rate_in_velocity: bool = Field(
        default=False,
        description="True: the rate multiplies the gradient, as in Keras; false: the velocity.",
    )


class SGD(OptimizerSpec):
    """Stochastic gradient descent (Robbins and Monro, 1951)."""

    kind: Literal["sgd"] = Field(default="sgd", description="Names this rule.")
    learning_rate: EitherRate = setting(
        kw_only=False,
        description="Step size; the schedule multiplies it. Negative only with the models `ledger` and `row_ledger`.",
    )


class Momentum(_Moving):
    """SGD with heavy-ball momentum (Polyak, 1964)."""

    kind: Literal["momentum"] = Field(default="momentum", description="Names this rule.")
    momentum: _Inertia = 0.9


class Nesterov(_Moving):
    """SGD with Nesterov's momentum (Sutskever et al., ICML 2013)."""

    kind: Literal["nesterov"] = Field(default="nesterov", description="Names this rule.")
    momentum: _Inertia = 0.9


class Adagrad(_Coupling):
    """Adagrad, diagonal (Duchi et al., JMLR 2011)."""

    kind: Literal["adagrad"] = Field(default="adagrad", description="Names this rule.")
    initial_accumulator: NonNegative = Field(default=0.0, description="Start of the sum of squared gradients.")
    epsilon: _Epsilon = 1e-10


class RowwiseAdagrad(OptimizerSpec):
    """Adagrad with one sum for each row of a table: of the mean of its squared gradient (FBGEMM's, as in TorchRec)."""

    kind: Literal["rowwise_adagrad"] = Field(default="rowwise_adagrad", description="Names this rule.")
    initial_accumulator: NonNegative = Field(default=0.0, description="Start of the sum of squared gradients.")
    epsilon: _Epsilon = 1e-8


class RMSProp(_Moving):
    """RMSProp (Hinton's lecture 6e, 2012), also with momentum and centered (Graves, 2013).

    Parameters
    ----------
    epsilon_in_root : bool
        False, as in PyTorch: g / (sqrt(s) + epsilon). True, as in Keras: g / sqrt(s + epsilon).
    momentum : float
        In [0, 1); 0: none.
    centered : bool
        True: s less the square of the mean gradient, an estimate of the variance, is under the root.
    """

    kind: Literal["rmsprop"] = Field(default="rmsprop", description="Names this rule.")
    learning_rate: _Rate = setting(default=0.001, kw_only=False)
    rho: Decay = Field(default=0.9, description="Decay of the squared gradient's running mean.")
    epsilon: _Epsilon = 1e-8
    epsilon_in_root: bool = Field(
        default=False, description="True: epsilon is added under the root, as in Keras; false: to the root."
    )
    momentum: _Inertia = 0.0
    centered: bool = Field(default=False, description="True: the mean gradient's square is subtracted under the root.")

    @property
    def rule(self) -> str:
        """Name of the kernels' rule: momentum and centering need further slots."""
        if self.centered:
            return "rmsprop_centered"
        return "rmsprop_momentum" if self.momentum else "rmsprop"


class Adam(OptimizerSpec):
    """Adam (Kingma and Ba, ICLR 2015); weight decay is L2."""

    kind: Literal["adam"] = Field(default="adam", description="Names this rule.")
    learning_rate: _Rate = setting(default=0.001, kw_only=False)
    beta1: _Beta1 = 0.9
    beta2: _Beta2 = 0.999
    epsilon: _Epsilon = 1e-8


class AdamW(OptimizerSpec):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019)."""

    kind: Literal["adamw"] = Field(default="adamw", description="Names this rule.")
    learning_rate: _Rate = setting(default=0.001, kw_only=False)
    weight_decay: _Decoupled = 0.01
    beta1: _Beta1 = 0.9
    beta2: _Beta2 = 0.999
    epsilon: _Epsilon = 1e-8


class FTRL(OptimizerSpec):
    """FTRL-Proximal (McMahan et al., KDD 2013): `learning_rate` is the paper's alpha, `l1` and `l2` its lambdas.

    Weights follow from the slots alone, which start at zero: an element's initial value survives only in part, and the
    first update of an element with a zero gradient sets it to 0. Meant for linear models that start at zero.
    Variables with `decay=False` have neither l1 nor l2.
    """

    kind: Literal["ftrl"] = Field(default="ftrl", description="Names this rule.")
    beta: Positive = Field(
        default=1.0, description="The paper's beta, added to the root of summed squares that divides the rate."
    )
    l1: NonNegative = Field(default=0.0, description="Strength of the L1 term, which makes weights exactly zero.")
    l2: NonNegative = Field(default=0.0, description="Strength of the L2 term.")


class LAMB(OptimizerSpec):
    """LAMB (You et al., ICLR 2020); weight decay is decoupled."""

    kind: Literal["lamb"] = Field(default="lamb", description="Names this rule.")
    weight_decay: _Decoupled = 0.01
    beta1: _Beta1 = 0.9
    beta2: _Beta2 = 0.999
    epsilon: _Epsilon = 1e-6

    @property
    def requires_unsplit_variables(self) -> bool:
        """True: the trust ratio is a quotient of norms over the whole variable."""
        return True


OptimizerOptions = Annotated[
    SGD | Momentum | Nesterov | Adagrad | RMSProp | Adam | AdamW | FTRL | LAMB, Field(discriminator="kind")
]
"""Any optimizer, discriminated by `kind`: the `[optimizer]` table of a job file."""

RowOptimizerOptions = Annotated[
    SGD | Momentum | Nesterov | Adagrad | RowwiseAdagrad | RMSProp | Adam | AdamW | FTRL, Field(discriminator="kind")
]
"""Any optimizer for table rows: all but LAMB, which needs norms of whole variables."""
