"""One shard under eight real threads, for seconds; `shard_threads.py` says what they do, and runs for minutes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from shard_threads import CELLS, ShardUnderThreads, ledger_of, of_weights

from parashard.plan.intervals import IntervalSet

SECONDS = 5.0
FIRED = ("duplicate", "pulled", "checkpoints", "checkpoint audited")
IN_ROUNDS = ("returned to a round", "refused: stale-incarnation")


@pytest.mark.full("one request at a time: test_admission_lock.py; whatever the order: tests/simulation")
@pytest.mark.parametrize(
    ("policy", "fired"), [("async", (*FIRED, "applied")), ("sync:8", (*FIRED, *IN_ROUNDS, "buffered"))]
)
def test_a_shard_counts_every_step_once_whatever_its_threads_do(
    tmp_path: Path, policy: str, fired: tuple[str, ...]
) -> None:  # P1, P3, P12
    before = set(threading.enumerate())
    outcome = ShardUnderThreads(tmp_path, policy, seed=1).run(SECONDS)
    assert outcome.wrong == []
    assert [name for name in fired if not outcome.counts[name]] == []
    assert set(threading.enumerate()) <= before  # one of an earlier test may end meanwhile


@pytest.mark.parametrize("each_cell", [True, False])
def test_the_oracle_sees_a_step_that_is_lost_and_one_that_is_counted_twice(each_cell: bool) -> None:
    applied = IntervalSet([(0, 3 * CELLS + 5), (4 * CELLS, 4 * CELLS + 1)])
    right = ledger_of(applied.intervals())
    assert of_weights(right.ravel(), applied, each_cell=each_cell) == []
    twice, lost = ledger_of([(7, 8)]), ledger_of([(CELLS + 7, CELLS + 8)])
    for wrong in (right + twice, right - lost, right + twice - lost):
        assert of_weights(wrong.ravel(), applied, each_cell=each_cell) != []
