"""Rules name what the rest of the shard names, and their lines are the same in C, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from parashard.plan.optimizers import SLOT_NAMES
from parashard_server.state.kernels import cuda, rules
from parashard_server.state.kernels.rules import RULES
from support.optimizer_specs import SPECS

IN_C = {
    "adam": """
        m = beta1 * m + one_minus_beta1 * g;
        v = beta2 * v + one_minus_beta2 * g * g;
        w = w - step_size * m / (sqrtf(v) + epsilon_t);
    """,
    "rmsprop_centered": """
        mean_square = rho * mean_square + one_minus_rho * g * g;
        mean = rho * mean + one_minus_rho * g;
        float variance = maximum(mean_square - mean * mean, 0.0f);
        velocity = momentum * velocity + entering * g / (sqrtf(variance + within) + beside);
        w = w - moving * velocity;
    """,
    "ftrl": """
        float root_before = sqrtf(squares);
        squares = squares + g * g;
        float root = sqrtf(squares);
        z = z + (g - (root - root_before) * reciprocal * w);
        float shrunk = where(z > l1, z - l1, where(z < -l1, z + l1, 0.0f));
        w = (0.0f - shrunk) / ((beta + root) * reciprocal + l2);
    """,
}


def squared(w, g, /):  # type: ignore[no-untyped-def]
    """Take a power, which C has not."""
    w = w - g**2
    return (w,)


def halved(w, g, /):  # type: ignore[no-untyped-def]
    """Have a number, which is a double in C, and float64 in a loop."""
    w = w - 0.5 * g
    return (w,)


def added_up(w, g, /):  # type: ignore[no-untyped-def]
    """Assign in place, which would change NumPy's arrays."""
    w -= g
    return (w,)


def test_every_rule_of_a_job_is_there_with_as_many_slots() -> None:
    assert {name: len(rule.slots) for name, rule in RULES.items()} == {
        name: len(slots) for name, slots in SLOT_NAMES.items()
    }


@pytest.mark.parametrize("name", RULES)
def test_names_of_slots_are_those_of_checkpoints_but_for_cupys(name: str) -> None:
    assert RULES[name].slots == tuple({"n": "squares"}.get(slot, slot) for slot in SLOT_NAMES[name])
    assert not {"i", "n"} & {*RULES[name].step.__code__.co_varnames}


@pytest.mark.parametrize("kind", SPECS)
def test_settings_are_fields_of_the_spec(kind: str) -> None:
    spec = SPECS[kind][0]
    rule = RULES[spec.rule]
    assert all(hasattr(spec, name) for name in (*rule.settings, *rule.regularisers))


@pytest.mark.parametrize("name", IN_C)
def test_the_lines_of_a_rule_are_the_same_in_c(name: str) -> None:
    assert cuda.statements(RULES[name].step).split("\n") == [line.strip() for line in IN_C[name].strip().split("\n")]


def test_an_expression_is_a_function_in_c() -> None:
    arguments = "float g, float w, float weight_decay, float clip, float scale"
    body = "return minimum(maximum(g * scale, -clip), clip) + weight_decay * w;"
    assert cuda.device_function(rules.prepared) == f"__device__ float prepared({arguments}) {{ {body} }}\n"


@pytest.mark.parametrize("rule", [squared, halved, added_up])
def test_what_c_says_otherwise_is_refused(rule: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError):
        cuda.statements(rule)
