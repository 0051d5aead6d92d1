"""What the recovery benchmarks compute from what they saw: nothing here runs a job."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from benchmarks import recovery_costs, recovery_times
from benchmarks.mnist_under_chaos import compared, in_band
from benchmarks.recovery_goodput import rate, victims
from benchmarks.watched_run import logged_s
from parashard._proto import shard_pb2


class TestVictims:
    def test_every_role_is_struck_equally_often(self) -> None:
        drawn = list(islice(victims(3, {"shard": 2, "worker": 2, "coordinator": 1}), 30))

        assert Counter(name.partition("-")[0] for name in drawn) == {"shard": 10, "worker": 10, "coordinator": 10}

    def test_every_process_of_a_role_is_struck(self) -> None:
        drawn = set(islice(victims(3, {"shard": 2, "worker": 2, "coordinator": 1}), 60))

        assert drawn == {"shard-0", "shard-1", "worker-0", "worker-1", "coordinator"}

    def test_a_seed_repeats_the_sequence(self) -> None:
        roles = {"shard": 3, "worker": 5, "coordinator": 1}

        assert list(islice(victims(8, roles), 20)) == list(islice(victims(8, roles), 20))


class TestGoodput:
    def test_the_rate_is_over_the_whole_time(self) -> None:
        assert rate([(1.0, 100), (2.0, 150), (4.0, 600)]) == 150.0

    def test_work_that_a_restored_shard_lost_does_not_count(self) -> None:
        assert rate([(1.0, 300), (2.0, None), (3.0, 150), (4.0, 400)]) == 100.0

    def test_a_shard_that_is_away_at_the_end_is_counted_when_it_was_last_seen(self) -> None:
        assert rate([(1.0, 100), (2.0, 220), (3.0, None)]) == 110.0


class TestCosts:
    ROWS = (
        {"case": recovery_costs.OFF, "turn": 0, "examples_per_s": 100.0, "stored": 2, "stall_s": 0.0},
        {"case": "saving", "turn": 0, "examples_per_s": 50.0, "stored": 4, "stall_s": 0.002},
        {"case": recovery_costs.OFF, "turn": 1, "examples_per_s": 10.0, "stored": 2, "stall_s": 0.0},
        {"case": "saving", "turn": 1, "examples_per_s": 8.0, "stored": 4, "stall_s": 0.001},
    )

    def test_a_run_is_compared_with_the_run_without_of_its_own_turn(self) -> None:
        assert recovery_costs.ratios(self.ROWS) == {recovery_costs.OFF: [1.0, 1.0], "saving": [0.5, 0.8]}

    def test_the_table_has_the_longest_stall_of_all_runs(self) -> None:
        saving = recovery_costs.section(self.ROWS).splitlines()[-1]

        assert saving == "| saving | 2 | 29 | 0.65 (0.50 to 0.80) | 8 | 2.0 ms |"


class TestTimes:
    def test_a_table_has_the_median_and_the_worst_of_each_moment(self) -> None:
        seen = {
            "worker": [
                {"noticed": 0.1, "joined": 1.0},
                {"noticed": 0.3, "joined": 9.0},
                {"noticed": 0.2, "joined": 2.0},
            ]
        }

        text = recovery_times.sections(seen, {"worker": 0.5})["Death of a worker"]

        assert "| noticed | 0.20 s | 0.30 s |" in text
        assert "| joined | 2.00 s | 9.00 s |" in text

    def test_a_push_counts_whether_or_not_its_staleness_is_known(self) -> None:
        known = [shard_pb2.StalenessCount(staleness=0, pushes=4), shard_pb2.StalenessCount(staleness=7, pushes=1)]

        assert recovery_times.pushes_applied(shard_pb2.InspectReply(staleness=known, unknown_staleness=2)) == 7


class Shards:
    """Stands for a watch over one shard that has applied so many pushes at each look; a coordinator comes at a look."""

    def __init__(self, pushes: list[int], coordinator_at: int) -> None:
        self._pushes, self._coordinator_at, self._looks = pushes, coordinator_at, 0

    def inspect(self, address: str) -> shard_pb2.InspectReply:
        self._looks += 1
        return shard_pb2.InspectReply(unknown_staleness=self._pushes[self._looks - 1])

    def status(self) -> object | None:
        return object() if self._looks >= self._coordinator_at else None

    def pause(self, seconds: float) -> None:
        """Take no time."""


class TestUsedUp:
    def test_leases_are_used_up_when_no_more_is_pushed(self) -> None:
        assert recovery_times.used_up(Shards([5, 8, 9, 9], coordinator_at=9), ["a shard"])  # type: ignore[arg-type]

    def test_a_coordinator_that_comes_before_ends_the_wait(self) -> None:
        assert not recovery_times.used_up(Shards([5, 8, 9], coordinator_at=3), ["a shard"])  # type: ignore[arg-type]


class TestLoggedTimes:
    def test_a_line_of_the_event_has_its_time(self) -> None:
        line = 'timestamp=1970-01-01T00:01:40.250000Z level=info event=restored what="p1/s0/i1/c3" steps=12'

        assert logged_s(line, "restored") == 100.25

    @pytest.mark.parametrize(
        "line",
        [
            "timestamp=1970-01-01T00:01:40.250000Z level=info event=serving address=127.0.0.1:1",
            "timestamp=1970-01-01T00:01:40.250000Z level=info event=restored-not what=x",
            "Traceback (most recent call last):",
            "",
        ],
    )
    def test_any_other_line_has_none(self, line: str) -> None:
        assert logged_s(line, "restored") is None


class TestBand:
    def test_the_mean_counts_and_not_a_single_run(self) -> None:
        assert in_band([0.90, 0.97], [0.93, 0.94])

    @pytest.mark.parametrize("values", [[0.90, 0.95], [0.94, 0.96]])
    def test_a_mean_on_either_side_is_outside(self, values: list[float]) -> None:
        assert not in_band(values, [0.93, 0.94])

    def test_each_figure_is_judged_by_itself(self) -> None:
        rows = [
            {"case": "no faults", "loss": 0.1, "accuracy": 0.96},
            {"case": "no faults", "loss": 0.2, "accuracy": 0.98},
            {"case": "chaos", "loss": 0.3, "accuracy": 0.97},
        ]

        assert [(line[0], line[-1]) for line in compared(rows)] == [("loss", "no"), ("accuracy", "yes")]
