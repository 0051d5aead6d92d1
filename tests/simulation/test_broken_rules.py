"""The simulation can see: with one rule of the protocol off, an oracle fails; with it on, the same seeds pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from broken_rules import BROKEN_RULES
from sim_run import drawn_setting, simulate

CAUGHT = 3
OTHER_SEEDS = 200
CALM_EVENTS_MAX = 15_000  # far more than any job needs with the rule on


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_without_the_rule_an_oracle_fails(rule: str) -> None:
    """P1, P4, P10, P11, P14."""
    broken, caught = BROKEN_RULES[rule], 0
    for seed in (*broken.seeds, *range(OTHER_SEEDS)):  # a change of the product changes what a seed's run meets
        setting = replace(drawn_setting(seed, broken.oracle, broken.policy), calm_events_max=CALM_EVENTS_MAX)
        off = simulate(seed, setting, broken.parts)
        if not any(text.startswith(f"{broken.sees}: ") for text in off.violations):
            continue
        on = simulate(seed, setting)
        assert on.violations == [], f"seed {seed}"
        caught += bool(on.fired[broken.needs])  # what the rule is for has happened
        if caught == CAUGHT:
            return
    pytest.fail(f"with {rule} off, the oracle {broken.sees} failed in {caught} runs only")
