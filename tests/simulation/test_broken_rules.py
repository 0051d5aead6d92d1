"""The simulation can see: with one rule of the protocol off, an oracle fails; with it on, the same seeds pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from broken_rules import BROKEN_RULES
from sim_run import drawn_setting, simulate

CALM_EVENTS_MAX = 6_000  # the seeds' jobs, with the rule on, are done after half as many


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_without_the_rule_an_oracle_fails(rule: str) -> None:
    """P1, P4, P10, P11, P14."""
    broken = BROKEN_RULES[rule]
    for seed in broken.seeds:
        setting = replace(drawn_setting(seed, broken.oracle, broken.policy), calm_events_max=CALM_EVENTS_MAX)
        off, on = simulate(seed, setting, broken.parts), simulate(seed, setting)
        assert any(text.startswith(f"{broken.sees}: ") for text in off.violations), f"seed {seed}: {off.violations}"
        assert on.violations == [], f"seed {seed}"
        assert on.fired[broken.needs], f"seed {seed}: nothing happened that the rule is for"
