"""The simulation can see: with one rule of the protocol off, an oracle fails; with it on, the same seeds pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from broken_rules import BROKEN_RULES
from sim_run import simulate

from support.logs import quiet_log

OTHER_SEEDS = 300


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """The product's own log costs as much time as a run."""
    with quiet_log():
        yield


@pytest.mark.full("shows that the oracles of test_simulated_jobs.py can fail")
@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_without_the_rule_an_oracle_fails(rule: str) -> None:
    """P1-P15, P23-P26, P29, P33, P37, P39."""
    broken = BROKEN_RULES[rule]
    seeds = dict.fromkeys(
        (*broken.seeds, *range(OTHER_SEEDS))
    )  # a change of the product changes what a seed's run meets
    for seed in seeds:
        setting = broken.setting(seed)
        off = simulate(seed, setting, broken.parts)
        if not any(text.startswith(f"{broken.sees}: ") for text in off.violations):
            continue
        on = simulate(seed, setting)
        assert on.violations == [], f"seed {seed}"
        if on.fired[broken.needs]:  # what the rule is for has happened
            return
    pytest.fail(f"with {rule} off, the oracle {broken.sees} failed in no run")


def test_every_rule_that_can_be_seen_is_switched_off() -> None:
    rules = {int(rule.partition("-")[0].removeprefix("P")) for rule in BROKEN_RULES}
    assert rules == {*range(1, 16), 23, 24, 25, 26, 29, 33, 37, 39}
