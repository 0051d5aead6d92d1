"""The update rules, each written once. `loops`, `cuda` and the tests' NumPy reference derive their code from these.

A rule is the arithmetic of one element: `w` is a weight, `g` its prepared gradient, then come the rule's slots, and
after the "/" scalars, which all elements share. It returns the new weight and slots. A body assigns sums, products and
quotients, `sqrt`, `maximum`, `minimum` and `where`, and has no number but ZERO, so that it means the same on arrays of
NumPy, on floats within a compiled loop, and as lines of C. CuPy reserves the names i and n.

Conventions, the same for all:

- Scalars arrive as Python floats. Those that depend on others, such as 1 - beta1, are computed in float64 by the
  function that a rule names, and then rounded to float32 once.
- Operations are float32 with one rounding each, in the order of the expressions (products and sums from left to right).
  No fused multiply-add, no reassociation: an element's result depends on that element alone, so that cutting the vector
  anywhere changes nothing. LAMB's norms are the exception, hence its whole variables.
- Denormals are zeros: an operand below the smallest normal number, 1.18e-38, counts as a zero of its sign, and a result
  below it becomes one. Modes of processors and compilers do that, for a whole loop. A result is compared after rounding
  to 24 bits; Arm compares it before rounding, and CUDA does not document which.
- GPUs have no tables: `rowwise_adagrad` and a t for each row exist only on the CPU.
"""

# A rule takes any type with the operators of a number.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from parashard_server.state.kernels.scalars import bias_corrections

ZERO = np.float32(0.0)
sqrt = np.sqrt

Values = Mapping[str, Any]
"""Scalars by name: floats, or for rows of a table arrays of float64 where they depend on t."""


def maximum(a, b):
    """Return the larger of two; NaN if one is."""
    return np.maximum(a, b)


def minimum(a, b):
    """Return the smaller of two; NaN if one is."""
    return np.minimum(a, b)


def where(condition, a, b):
    """Return a where the condition holds, else b."""
    return np.where(condition, a, b)


def prepared(g: Any, w: Any, /, weight_decay: Any, clip: Any, scale: Any) -> Any:
    """Scale a gradient (1/n makes a mean of a sum), bound each element (infinity: off), and add the L2 penalty."""
    return minimum(maximum(g * scale, -clip), clip) + weight_decay * w


OF_PREPARED = ("weight_decay", "clip", "scale")


class Rule(NamedTuple):
    """A rule and its inputs."""

    step: Callable[..., tuple[Any, ...]]
    slots: tuple[str, ...]
    of_step: tuple[str, ...]
    """Scalars of the step, in its order."""
    scalars: tuple[str, ...]
    """Those, then those of `prepared`."""
    settings: tuple[str, ...]
    """Fields of the optimizer's spec."""
    derive: Callable[..., dict[str, Any]]
    """Returns scalars that depend on others, in float64."""
    by_t: tuple[str, ...] = ()
    """Scalars that depend on t, the number of updates; rows of a table have their own."""
    regularisers: tuple[str, ...] = ("weight_decay",)
    """Fields of the spec that are 0 for variables with `decay=False`."""
    least_rate: float = -math.inf
    """An update with a learning rate below this changes nothing."""

    def values(self, settings: dict[str, Any]) -> Values | None:
        """Return every scalar by name, in float64; None if the update changes nothing."""
        # `settings` has learning_rate, weight_decay, clip, scale and the rule's own; for one with `by_t` also t, which
        # counts from 1, or an array of uint32 with the number of pushes of each row of a table.
        if settings["learning_rate"] < self.least_rate:
            return None
        return settings | self.derive(**settings)


RULES: dict[str, Rule] = {}


def rule(*settings: str, derive: Callable[..., dict[str, Any]] = lambda **_: {}, **others: Any) -> Callable[..., Any]:
    """Declare a rule: its settings, how scalars are derived from them, and other fields of `Rule`."""

    def declare(step: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        code = step.__code__
        slots = code.co_varnames[2 : code.co_posonlyargcount]
        of_step = code.co_varnames[code.co_posonlyargcount : code.co_argcount]
        scalars = (*of_step, *OF_PREPARED)
        RULES[step.__name__] = Rule(step, slots, of_step, scalars, settings, derive, **others)
        return step

    return declare


@rule()
def sgd(w, g, /, learning_rate):
    """Gradient descent (Robbins and Monro, 1951)."""
    w = w - learning_rate * g
    return (w,)


def _rates(learning_rate, rate_in_velocity=0.0, **_):
    """Return the factor of the gradient in the velocity's update, and that of the velocity in the weights' update."""
    # As in PyTorch the rate multiplies the velocity when it is used: a schedule acts on the whole step at once. With
    # `rate_in_velocity`, as in Keras, it multiplies the gradient. At a constant rate the two are the same.
    entering, moving = (learning_rate, 1.0) if rate_in_velocity else (1.0, learning_rate)
    return {"entering": entering, "moving": moving}


@rule("momentum", "rate_in_velocity", derive=_rates)
def momentum(w, g, velocity, /, entering, moving, momentum):
    """Heavy ball (Polyak, 1964, eq. 9)."""
    velocity = momentum * velocity + entering * g
    w = w - moving * velocity
    return w, velocity


@rule("momentum", "rate_in_velocity", derive=_rates)
def nesterov(w, g, velocity, /, entering, moving, momentum):
    """Nesterov's momentum (Sutskever et al., ICML 2013, eqs. 3 and 4)."""
    # In the form of Bengio et al. (ICASSP 2013, eq. 7), as in PyTorch: `w` is the point at which the next gradient is
    # taken, so that workers pull exactly that.
    entered = entering * g
    velocity = momentum * velocity + entered
    w = w - moving * (entered + momentum * velocity)
    return w, velocity


@rule("epsilon")
def adagrad(w, g, accumulator, /, learning_rate, epsilon):
    """Adagrad (Duchi et al., JMLR 2011, fig. 1, diagonal, without its proximal term); epsilon is the paper's delta."""
    accumulator = accumulator + g * g
    w = w - learning_rate * g / (sqrt(accumulator) + epsilon)
    return w, accumulator


@rule("epsilon")
def rowwise_adagrad(w, g, accumulator, /, mean_square, learning_rate, epsilon):
    """Adagrad with one number for each row: FBGEMM's exact row-wise Adagrad, TorchRec's default."""
    # `mean_square` is the mean of g g over the row, added in the order of its elements.
    accumulator = accumulator + mean_square
    w = w - learning_rate * g / (sqrt(accumulator) + epsilon)
    return w, accumulator


def _of_rmsprop(rho, epsilon, epsilon_in_root=0.0, **others):
    """Return RMSProp's derived scalars: `epsilon` stands outside the root, as in PyTorch, or within, as in Keras."""
    within, beside = (epsilon, 0.0) if epsilon_in_root else (0.0, epsilon)
    return {"one_minus_rho": 1.0 - rho, "within": within, "beside": beside, **_rates(**others)}


@rule("rho", "epsilon", "epsilon_in_root", derive=_of_rmsprop)
def rmsprop(w, g, mean_square, /, learning_rate, rho, one_minus_rho, within, beside):
    """RMSProp (Hinton, lecture 6e, 2012, which has no epsilon)."""
    mean_square = rho * mean_square + one_minus_rho * g * g
    w = w - learning_rate * g / (sqrt(mean_square + within) + beside)
    return w, mean_square


_RMSPROP = ("rho", "epsilon", "epsilon_in_root", "momentum", "rate_in_velocity")


@rule(*_RMSPROP, derive=_of_rmsprop)
def rmsprop_momentum(
    w, g, mean_square, velocity, /, entering, moving, momentum, rho, one_minus_rho, within, beside
):  # fmt: skip
    """RMSProp with momentum: its quotient is the gradient of `momentum` (Graves, 2013)."""
    mean_square = rho * mean_square + one_minus_rho * g * g
    velocity = momentum * velocity + entering * g / (sqrt(mean_square + within) + beside)
    w = w - moving * velocity
    return w, mean_square, velocity


@rule(*_RMSPROP, derive=_of_rmsprop)
def rmsprop_centered(
    w, g, mean_square, mean, velocity, /, entering, moving, momentum, rho, one_minus_rho, within, beside
):  # fmt: skip
    """`rmsprop_momentum` with an estimate of the variance under the root (Graves, 2013, eqs. 38 to 41)."""
    # Other libraries may take the root of a negative number, by rounding; here the variance is at least 0.
    mean_square = rho * mean_square + one_minus_rho * g * g
    mean = rho * mean + one_minus_rho * g
    variance = maximum(mean_square - mean * mean, ZERO)
    velocity = momentum * velocity + entering * g / (sqrt(variance + within) + beside)
    w = w - moving * velocity
    return w, mean_square, mean, velocity


def _of_adam(learning_rate, beta1, beta2, epsilon, t, **_):
    """Return Adam's derived scalars; see `scalars.bias_corrections`."""
    correction, root = bias_corrections(beta1, beta2, t)
    return {
        "one_minus_beta1": 1.0 - beta1,
        "one_minus_beta2": 1.0 - beta2,
        "correction": correction,
        "step_size": learning_rate * correction,
        "epsilon_t": epsilon * root,
    }


_ADAM = ("beta1", "beta2", "epsilon")


@rule(*_ADAM, derive=_of_adam, by_t=("step_size", "epsilon_t"))
def adam(w, g, m, v, /, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon_t):
    """Adam (Kingma and Ba, ICLR 2015, algorithm 1)."""
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * g * g
    w = w - step_size * m / (sqrt(v) + epsilon_t)
    return w, m, v


def _of_adamw(learning_rate, weight_decay, **others):
    """Return AdamW's derived scalars: weight decay is not part of g."""
    shrink = {"shrink": learning_rate * weight_decay, "weight_decay": 0.0}
    return _of_adam(learning_rate, **others) | shrink


@rule(*_ADAM, derive=_of_adamw, by_t=("step_size", "epsilon_t"))
def adamw(w, g, m, v, /, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon_t, shrink):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019, algorithm 2)."""
    # The decay is multiplied by the whole learning rate, as in PyTorch; in the paper by its schedule's multiplier
    # alone. Of a table's rows only those that are pushed decay.
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * g * g
    w = w - (step_size * m / (sqrt(v) + epsilon_t) + shrink * w)
    return w, m, v


def _of_ftrl(learning_rate, **_):
    return {"reciprocal": 1.0 / learning_rate}


@rule("beta", derive=_of_ftrl, regularisers=("weight_decay", "l1", "l2"), least_rate=1e-20)
def ftrl(w, g, z, squares, /, reciprocal, beta, l1, l2):
    """FTRL-Proximal (McMahan et al., KDD 2013, algorithm 1, whose n is `squares`)."""
    # It divides by its learning rate: one below `least_rate`, such as a warm-up's 0, leaves weights and slots as they
    # were. With `weight_decay` the L2 penalty also enters g; the paper has `l2` alone.
    root_before = sqrt(squares)
    squares = squares + g * g
    root = sqrt(squares)
    z = z + (g - (root - root_before) * reciprocal * w)
    shrunk = where(z > l1, z - l1, where(z < -l1, z + l1, ZERO))
    w = (ZERO - shrunk) / ((beta + root) * reciprocal + l2)
    return w, z, squares


def _of_lamb(weight_decay, **others):
    """Return LAMB's derived scalars: weight decay is not part of g."""
    return _of_adam(**others) | {"decay": weight_decay, "weight_decay": 0.0}


@rule(*_ADAM, derive=_of_lamb, by_t=("correction", "epsilon_t"))
def lamb(w, g, m, v, /, beta1, one_minus_beta1, beta2, one_minus_beta2):
    """LAMB (You et al., ICLR 2020, algorithm 2, with phi the identity), up to its moments, for a whole variable."""
    # Then with the direction u for all elements w <- w - alpha |w| / |u| u, where |w| / |u| is 1 if either norm is 0.
    # Squares are exact in float64 and added in index order within blocks of `scalars.BLOCK_ELEMENTS`, whose sums are
    # added in order.
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * g * g
    return m, v


def lamb_direction(w: Any, m: Any, v: Any, /, correction: Any, epsilon_t: Any, decay: Any) -> Any:
    """Return the direction of LAMB's step."""
    return correction * m / (sqrt(v) + epsilon_t) + decay * w


def decayed(w: Any, /, share: Any) -> Any:
    """Shrink weights: the decoupled weight decay of rules other than `adamw` and `lamb`."""
    return w - share * w
