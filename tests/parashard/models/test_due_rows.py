"""What is due by the ledger's own reading of the rules is what the shards' readable reference ends with (P29)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.checkpoints.row_files import StoredRows
from parashard.job.model_options import RowLedgerOptions
from parashard.models.due_rows import Applied, entries_of
from parashard.models.oracles import TABLE, RowLedger
from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.plan.optimizers import SGD
from parashard.plan.row_rules import RowRules
from parashard.plan.steps import StepPlan
from support.model_cases import spec_of
from support.reference_rows import ReferenceRows
from support.tiers import fewer

OWN, SHARED, SEED = 20, 3, 4
STEPS = StepPlan(OWN, 4, 4, SEED)
IDS = np.concatenate([np.arange(OWN), (1 << 62) + np.arange(SHARED)])
RULES = {
    "age": RowRules(evict_unused_steps=4),
    "count": RowRules(admit_after=2),
    "count and age": RowRules(admit_after=2, evict_unused_steps=5),
    "norm": RowRules(evict_norm_below=4.0, evict_norm_every=3),
    "chance": RowRules(admit_probability=0.5),
    "all": RowRules(2, 0.7, 6, 2.0, 2),
}


def ended(rules: RowRules, order: Sequence[Sequence[int]]) -> StoredRows:
    """Return the rows after steps were applied, some of them together."""
    table = EmbeddingTable(TABLE, 2, SGD(-1.0), rules=rules)
    rows = ReferenceRows(table, SEED)
    for clock, steps in enumerate(order, 1):
        added = sum(entries_of(Applied(STEPS, 1, rules, SEED, ordered=False), step, OWN, SHARED) for step in steps)
        used = np.flatnonzero(added[:, 0])
        rows.push(mixed(IDS[used]), added[used].astype(np.float32), clock=clock)
    rows.pull(np.empty(0, np.uint64), len(order))
    keys = np.array(sorted(rows.rows), np.uint64)
    of_keys = [rows.rows[int(key)] for key in keys]
    values = np.array([row.values for row in of_keys], np.float32).reshape(-1, 2)
    t, last = (np.array([getattr(row, name) for row in of_keys], np.uint32) for name in ("t", "last_use"))
    return StoredRows(keys, t, last, values, {})


def wrong(rules: RowRules, rows: StoredRows, round_steps: int | None) -> int:
    ledger = RowLedger(spec_of((1,), examples=OWN), RowLedgerOptions(shared=SHARED))
    counted = ("ledger candidates", rows)
    return ledger.audit_rows(
        [(TABLE, rows), counted], 4, Applied(STEPS, round_steps or 1, rules, SEED, ordered=round_steps is not None)
    )["rows_wrong"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("round_steps", [1, 3])
def test_rounds_end_with_what_is_due(rule: str, round_steps: int) -> None:
    rounds = [range(first, min(first + round_steps, STEPS.total)) for first in range(0, STEPS.total, round_steps)]
    rows = ended(RULES[rule], rounds)
    assert wrong(RULES[rule], rows, round_steps) == 0
    assert len(rows.keys) > 0
    again = [*rounds[:2], rounds[1], *rounds[2:]]
    assert wrong(RULES[rule], ended(RULES[rule], again), round_steps) > 0
    assert wrong(RULES[rule], ended(RULES[rule], rounds[1:]), round_steps) > 0


@pytest.mark.parametrize("rule", RULES)
@given(st.permutations(range(STEPS.total)))
@fewer(2)
def test_any_order_of_steps_is_within_the_bounds(rule: str, order: list[int]) -> None:
    assert wrong(RULES[rule], ended(RULES[rule], [[step] for step in order]), None) == 0


@given(st.permutations(range(STEPS.total)), st.integers(0, STEPS.total - 1))
@fewer(2)
def test_a_step_too_many_or_too_few_shows_in_any_order_where_rows_stay(order: list[int], at: int) -> None:
    rules = RULES["count"]
    singles = [[step] for step in order]
    assert wrong(rules, ended(rules, [*singles[:at], *singles[at + 1 :]]), None) > 0
    assert wrong(rules, ended(rules, [*singles, singles[at]]), None) > 0


def test_rows_that_nobody_used_or_that_come_twice_are_wrong() -> None:
    rows = ended(RULES["age"], [[step] for step in range(STEPS.total)])
    twice = StoredRows(*(np.concatenate([part, part[:1]]) for part in rows[:4]), {})
    assert wrong(RULES["age"], twice, 1) >= 1
    stray = rows._replace(keys=np.concatenate([mixed(np.array([OWN + 5])), rows.keys[1:]]))
    assert wrong(RULES["age"], stray, 1) >= 1
