"""The verdict on a run under faults: each broken promise is seen, and told in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from campaigns import Campaign, summed
from failpoint_sweep import spec
from job_run import Ended, Expected, violations
from sweeps import ONCE, Sweep

from parashard.process.failpoints import parse

REPORT = {"state": "done", "shards": 2, "steps_applied": [8, 8], "steps_total": 8, "ledger_wrong": 0, "torn": 0}
SOUND = Ended(0, {**REPORT, "weights_sha256": "a1"}, "", ())


def test_rows_of_tables_that_differ_are_told() -> None:
    rows = {"ledger": "d1"}
    sound = replace(SOUND, report={**SOUND.report, "rows_digest": rows})
    assert violations(sound, Expected("a1", rows=rows)) == []
    assert violations(sound, Expected("a1", rows={"ledger": "d2"})) == [
        "rows of tables are {'ledger': 'd1'}, not {'ledger': 'd2'}"
    ]


def test_a_run_that_kept_every_promise_has_no_violation() -> None:
    assert violations(SOUND) == []
    assert violations(SOUND, Expected("a1")) == []


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"state": "failed"}, "exit code 0, state failed: "),
        ({"ledger_wrong": 3}, "ledger_wrong is 3"),
        ({"rows_wrong": 2}, "rows_wrong is 2"),
        ({"torn": 1}, "torn is 1"),
        ({"weights_sha256": "b2"}, "weights are b2, not a1"),
    ],
)
def test_a_broken_promise_in_the_report_is_reported(found: dict[str, Any], told: str) -> None:
    assert violations(replace(SOUND, report={**SOUND.report, **found}), Expected("a1")) == [told]


def test_a_run_without_a_report_is_a_violation() -> None:
    ended = Ended(-1, {}, "the job has not ended within its time", ())
    assert violations(ended) == ["exit code -1, state None: the job has not ended within its time"]


def test_a_process_that_is_left_over_is_a_violation() -> None:
    assert violations(replace(SOUND, left_over=("python -m parashard_worker",))) == [
        "left over: python -m parashard_worker"
    ]


def test_violations_are_counted_among_all_jobs() -> None:
    sound = Campaign("ledger", "async", "tcp", faults=Counter(kill_worker=2))
    broken = Campaign("torn", "async", "shm", faults=Counter(kill_worker=1, delay=1), broken=["torn is 1"])
    figures = summed([sound, broken])
    assert figures["violations"] == "1 of 2"
    assert figures["faults"] == 4
    assert figures["faults_by_kind"] == {"delay": 1, "kill_worker": 3}


def test_each_failpoint_kills_as_often_as_asked_and_what_brings_a_job_there_more_often() -> None:
    sweep = Sweep("x", "x.toml", "async", 1, {"shard.boot.claimed": ONCE}, fuel={"shard.push.received": 60})
    faults = {fault.name: fault for fault in parse(spec(sweep, times=20))}
    assert {(f.name, f.action, f.first, f.last, f.times) for f in faults.values()} == {
        ("shard.boot.claimed", "kill", 1, 2, 20),
        ("shard.push.received", "kill", 1, 60, 60),
    }
    assert parse(spec(sweep, times=1))[0].last == 1  # an incarnation that survived it might never pass it again
