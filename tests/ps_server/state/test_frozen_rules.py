"""Each rule has the bits that it had before, in NumPy, compiled, and as CUDA's source on this CPU; NaN stays NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard_server.state.kernels import fused
from support import reference_rules as reference
from support.frozen_rules import FILE, RULES, cases, kept
from support.hosted_cuda import Hosted

CASES, KEPT = list(cases()), kept()
ROWS = ("adam by row", "adamw by row", "rowwise_adagrad")
"""Rules of tables, which no GPU has."""


def differing(kernels: Any, rule: str) -> list[str]:
    """Return every element that a rule's cases have not as the file says."""
    found = []
    for case in (case for case in CASES if case.rule == rule):
        for number, (array, expected) in enumerate(zip(case.run(kernels), KEPT[case.key], strict=True)):
            differs = (array.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(array) & np.isnan(expected))
            places = np.flatnonzero(differs)
            found += [f"{case.name}: array {number}, place {i}: {array[i]}, was {expected[i]}" for i in places]
    return found


def test_the_file_has_every_case_and_no_other() -> None:
    assert set(KEPT) == {case.key for case in CASES}, f"PYTHONPATH=tests python -m support.frozen_rules ({FILE.name})"


@pytest.mark.parametrize("kernels", [fused, reference])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_the_bits_that_it_had(kernels: Any, rule: str) -> None:
    assert differing(kernels, rule) == []


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ROWS])
def test_the_source_of_a_gpu_has_them_too(on_this_cpu: Hosted, rule: str) -> None:
    assert differing(on_this_cpu, rule) == []
