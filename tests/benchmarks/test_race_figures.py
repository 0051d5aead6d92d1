"""What the races compute from what they measured: nothing here starts a process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import recovery_costs
from benchmarks.races import ballast, growth, memory, promises, push_pull, training
from benchmarks.races.ballast import Ballast
from benchmarks.races.growth import MIB, Case, Cost
from parashard.data.base import Batch, DataSpec
from parashard.job.load import load_job

SPEC = DataSpec(input_shape=(1,), classes=2, examples=1000, held_out=0, fingerprint="")


class TestBallast:
    def test_its_gradients_add_up_exactly_to_what_the_audit_expects(self) -> None:
        model, weights = Ballast(SPEC, 512), {"ballast": np.zeros((2, 256), np.float32)}
        batch = Batch(0, 0, np.arange(1), np.zeros((1, 1)), np.zeros(1))
        for _ in range(2 * SPEC.examples):
            weights["ballast"] -= model.loss_and_gradients(weights, batch, np)[1]["ballast"]

        assert model.audit(weights, epochs=2) == {"wrong": 0}

    @pytest.mark.parametrize("shape", [(0, 256), (1, 3), (1, 256), (33, 256)])
    def test_its_gradient_goes_from_one_to_seven(self, shape: tuple[int, int]) -> None:
        expected = np.arange(shape[0] * shape[1]) % 7 + 1

        assert np.array_equal(1024 * ballast.gradient(shape).reshape(-1), expected)

    def test_a_missing_push_is_seen_in_every_weight(self) -> None:
        short = -np.float32(SPEC.examples - 1) * ballast.gradient((2, 256))

        assert Ballast(SPEC, 512).audit({"ballast": short}, epochs=1) == {"wrong": 512}


class TestJobs:
    @pytest.mark.parametrize("file", [growth.JOB, training.JOB])
    def test_a_job_of_the_races_is_valid(self, file: Any) -> None:
        job = load_job(file, [], {}).job

        assert (job.checkpoint.every_s, str(job.consistency.policy)) == (0.0, "async")

    def test_all_contestants_train_in_batches_of_the_same_size(self) -> None:
        assert load_job(training.JOB, [], {}).job.job.batch_size == training.BATCH == promises.BATCH


class TestPushPull:
    ANSWERS = ({"both_ms": [3.0, 9.0, 4.0], "push_ms": [2.0], "pull_ms": [1.0]},)

    def test_a_round_counts_by_its_median(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def in_turns(contestants: Any, requests: Any, rounds: int) -> Any:
            answers = {"shm": [list(self.ANSWERS)], "TensorFlow": [[{**self.ANSWERS[0], "both_ms": [20.0]}]]}
            return answers, {"TensorFlow": {"tensorflow": "2"}}

        monkeypatch.setattr(push_pull, "in_turns", in_turns)
        us, others = [push_pull.ours("shm", [])], [push_pull.ours("TensorFlow", [])]

        rows, versions = push_pull.raced(us, others, [{"size_bytes": MIB}], rounds=1)

        found = [(row.race, row.size, row.ours_ms, row.ratio, row.target) for row in rows]
        assert found[0] == ("same host", "1 MiB, push + pull", 4.0, 5.0, 5.0)
        assert [row[-1] for row in found[1:]] == [None, None], "targets are for the two together"
        assert versions == {"TensorFlow": {"tensorflow": "2"}}

    def test_only_contestants_that_have_a_loop_are_compared_by_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looped = {**self.ANSWERS[0], "loop_ms": [2.0]}
        answers = {"shm": [[looped]], "TensorFlow": [[{**looped, "loop_ms": [12.0]}]], "Ray": [[self.ANSWERS[0]]]}
        monkeypatch.setattr(push_pull, "in_turns", lambda *_: (answers, {}))
        others = [push_pull.ours(name, []) for name in ("TensorFlow", "Ray")]

        rows, _ = push_pull.raced([push_pull.ours("shm", [])], others, [{"size_bytes": MIB}], rounds=1)

        found = [(row.peer, row.ratio, row.reached) for row in rows if row.size.endswith("loop")]
        assert found == [("TensorFlow", 6.0, True)]

    def test_a_transport_is_a_setting_of_the_job(self) -> None:
        assert push_pull.settings_of("shm") == ['cluster.transport="shm"']
        assert push_pull.settings_of("default") == []


class TestGrowth:
    COSTS = {  # noqa: RUF012
        Case(1, 1, MIB): [Cost(0.010, 0.1), Cost(0.020, 0.3)],
        Case(1, 2, MIB): [Cost(0.005, 0.2), Cost(0.040, 0.2)],
    }

    def test_a_case_is_reported_relative_to_the_first_of_its_own_turn(self) -> None:
        assert growth.rows_of(self.COSTS)[1]["relative"] == [0.5, 2.0]

    def test_a_step_moves_the_model_twice(self) -> None:
        assert growth.rows_of(self.COSTS)[0]["moved_mib_per_s"] == pytest.approx(2 / 0.015)

    def test_the_table(self) -> None:
        assert (
            growth.section(self.COSTS).splitlines()[-1] == "| 1 | 2 | 1 MiB | 22.5 | 89 | 1.25 (0.50 to 2.00) | 200 |"
        )

    def test_what_the_first_steps_take_more_is_in_no_step(self) -> None:
        cost = growth.cost_between(16, 3.0 + 16 * 0.1, 80, 3.0 + 80 * 0.1)

        assert cost == pytest.approx((0.1, 3.0))

    @pytest.mark.parametrize(("size_bytes", "steps"), [(1, 8000), (16 * MIB, 256), (1024 * MIB, 64)])
    def test_runs_move_about_the_same_and_are_neither_endless_nor_over_at_once(
        self, size_bytes: int, steps: int
    ) -> None:
        assert growth.steps_of(size_bytes, 4096 * MIB) == steps

    def test_bytes_are_swept_from_64_kib_to_256_mib(self) -> None:
        sizes = [case.size for case in growth.SWEEPS["bytes"]]

        assert (sizes[0], sizes[-1]) == ("64 KiB", "256 MiB")


class TestMemory:
    SEEN = {  # noqa: RUF012
        "variables": 256 * MIB,
        "slots": 512 * MIB,
        "assembled_max": 0,
        "pushes": 7,
        "pss": 0,
    }

    def test_rss_and_pss_are_read_in_bytes(self) -> None:
        text = "55d0-7ffd ---p 00000000 00:00 0 [rollup]\nRss:  2048 kB\nPss:  1024 kB\nPss_Dirty:  1 kB\n"

        assert memory.rolled_up(text) == {"rss": 2 * MIB, "pss": MIB}

    @pytest.mark.parametrize(("rss_mib", "reached"), [(1531, True), (1532, False)])
    def test_the_bound_is_what_it_holds_and_a_third_and_200_mib(self, rss_mib: int, reached: bool) -> None:
        figures = memory.judged({**self.SEEN, "rss": rss_mib * MIB}, budget_bytes=256 * MIB)

        assert figures["reached"] is reached  # 1.3 * (256 + 512 + 256) + 200 = 1531.2


class TestPromises:
    def test_two_workers_push_their_leases_in_turns(self) -> None:
        order = promises.interleaved(64)

        assert order[:4] == [0, 16, 1, 17]
        assert sorted(order) == list(range(64))

    def test_bookkeeping_is_reported_as_a_share_of_the_kernel(self) -> None:
        row = {"optimizer": "SGD", "size_bytes": MIB, "kernel_us": [100.0, 200.0], "bookkeeping_us": [5.0, 5.0]}

        assert promises.bookkeeping_section([row]).splitlines()[-1].endswith("| 150.0 | 5.0 | 3.75 (2.50 to 5.00) |")
        assert promises.bookkeeping_rows([row])[0].ratio == pytest.approx(150 / 155)

    def test_runs_are_compared_with_those_without(self) -> None:
        runs = [{"case": case, "examples_per_s": rate} for case, rate in ((recovery_costs.OFF, 128.0), ("log", 64.0))]

        (row,) = promises.run_rows(runs)

        assert (row.ours, row.ours_ms, row.peer_ms, row.ratio) == ("log", 2000.0, 1000.0, 0.5)

    def test_without_runs_there_are_no_rows(self) -> None:
        assert promises.run_rows([]) == []


class TestTraining:
    FOUND = {  # noqa: RUF012
        "parashard": [{"examples_per_s": 64_000.0, "to_target_s": 2.0, "accuracy": 0.975}],
        "TensorFlow": [{"examples_per_s": 16_000.0, "to_target_s": None, "accuracy": 0.96}],
    }

    def test_the_ratio_is_that_of_examples_per_second(self) -> None:
        (row,) = training.rows_of(2, self.FOUND)

        assert (row.ours_ms, row.ratio, row.target, row.reached) == (2.0, 4.0, 2.5, True)

    def test_one_that_never_reaches_the_accuracy_is_reported(self) -> None:
        lines = training.figures({1: self.FOUND}).splitlines()

        assert "2.00 (2.00 to 2.00) in 1 of 1" in lines[-2]
        assert "never in 1" in lines[-1]


@pytest.mark.parametrize(
    ("steps", "accuracy", "seconds"),
    [
        pytest.param(1000, 0.957, 2.0, id="it ended at its target, and the steps under way took it below again"),
        pytest.param(2000, 0.975, 4.0, id="the target was reached at the very end"),
        pytest.param(2000, 0.957, None, id="it was never reached"),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_job_that_ended_early_has_reached_its_target(
    steps: int, accuracy: float, seconds: float | None, parts: int
) -> None:
    report = {
        "steps_total": steps,
        "steps_applied": [steps],
        "held_out": {"accuracy": accuracy},
        "examples_per_s": 500.0 * training.BATCH / parts,
        "consistency": "async" if parts == 1 else f"auto:{parts}",
    }
    assert training.to_target_s(report, 2000, 0.97) == seconds
