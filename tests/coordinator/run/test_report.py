"""The report: the figures that scripts read, and a digest of the final weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors import safe_open

from parashard.checkpoints.row_files import StoredRows
from parashard.data.preprocessing import ClassTarget, Preprocessing, read_preprocessing
from parashard.job.load import job_from_toml
from parashard.plan.embedding import mixed
from parashard.plan.variables import Float32s, values_sha256
from parashard.process.run_files import REPORT_FILE
from parashard_coordinator.core.callback_progress import DecidedRate
from parashard_coordinator.core.core import Core
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.run.report import audited, report, save_preprocessing, save_report, save_weights
from parashard_coordinator.run.resolve import ResolvedJob
from parashard_coordinator.run.store import SavedModel
from support.coordinator_cases import Caller, announce, core_of, done, judged
from support.resolved_job import resolved_here
from support.shard_process import PLAN
from support.shard_records import record_of

REQUIRED = {
    "job", "steps_total", "steps_applied", "duplicate_pushes", "examples_per_s", "wall_s", "training_loss",
    "held_out", "staleness", "step_lag", "network", "bytes", "worker_restarts", "shard_restarts",
    "coordinator_restarts", "weights_sha256", "data", "parameters",
}  # fmt: skip
LEDGER = """
job = { name = "ledger", epochs = 2, batch_size = 4 }
data = { source = "synthetic", examples = 6, features = 1 }
model = { kind = "ledger" }
optimizer = { kind = "sgd", learning_rate = -1.0 }
consistency = { policy = "ssp:8", reduce = "sum" }
"""


ROW_LEDGER = (
    LEDGER.replace('kind = "ledger"', 'kind = "row_ledger"')
    + 'tables.ledger = { dimension = 2, initializer = "zeros", optimizer = { kind = "sgd", learning_rate = -1.0 } }'
    + "\ntables.unused.dimension = 1"
)


def ledger() -> ResolvedJob:
    return resolved_here(job_from_toml(LEDGER))


def row_ledger() -> ResolvedJob:
    return resolved_here(job_from_toml(ROW_LEDGER))


def saved(variables: dict[str, Float32s], *rows: StoredRows) -> SavedModel:
    """Return a model as it was saved last, with rows of the table "ledger" in pieces."""
    counts = {"ledger": sum(len(piece.keys) for piece in rows)}
    return SavedModel(variables, PLAN, (4, 4), counts, lambda: iter([("ledger", piece) for piece in rows]))


def rows_of(ids: list[int], value: tuple[float, float]) -> StoredRows:
    keys, counts = np.sort(mixed(np.array(ids))), np.ones(len(ids), np.uint32)
    return StoredRows(keys, counts, counts, np.tile(np.array(value, np.float32), (len(ids), 1)), {})


def ended() -> Core:
    """Return a job of four steps, each of 8 examples, that took 2 s and ended with an accuracy of 0.75."""
    core = core_of(steps_total=4, evaluate_after=[4])
    caller = Caller(core)
    for step in range(4):
        caller.lease(1, now_s=1.0)
        core.job.leases.skips.update({3} if step == 3 else ())
        caller.call(3.0, completed=done(step, skipped=step == 3))
    for shard in range(2):
        announce(core, shard, applied=[(0, 4)], skipped=[3])
    caller.call(3.0, want=1, phases_s={"pull": 1.0, "push": 0.5, "compute": 3.0, "transfer": 2.0})
    caller.call(4.0, evaluated=judged(4, accuracy=0.75, loss=0.125))
    return core


def seen() -> StatusView:
    status = StatusView("ledger", "async")
    sent = {"push_bytes": 25, "push_float32_bytes": 100, "pull_bytes": 75, "pull_unmoved_bytes": 25}
    status.saw(0, record_of(0, 4, {0: 3, 2: 1}, duplicate_pushes=2, refused_pushes=1, step_lag_max=3, **sent))
    status.saw(1, record_of(1, 4, {1: 4}, duplicate_pushes=5, step_lag_max=1, **sent))
    return status


def test_it_has_every_figure_that_is_promised() -> None:
    resolved = ledger()
    model = saved({"ledger": np.zeros((6, 2), np.float32)})
    figures = report(ended().job, resolved, seen(), 4.0) | audited(resolved, model)
    assert figures.keys() >= REQUIRED | {"ledger_wrong"}
    assert figures["ledger_wrong"] == 6
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_weights_are_audited_by_their_digest_and_the_model() -> None:
    right = {"ledger": np.tile(np.array([2, 5], np.float32), (6, 1))}
    assert audited(ledger(), saved(right)) == {"weights_sha256": values_sha256(right), "ledger_wrong": 0}


def test_rows_are_counted_by_table_and_audited_by_the_model() -> None:
    entries = {"entries": np.tile(np.array([2, 5], np.float32), (6, 1))}
    own, shared = list(range(6)), [(1 << 62) + key for key in range(6)]
    right = saved(entries, rows_of(own, (2, 5)), rows_of(shared, (2, 5)))
    figures = audited(row_ledger(), right)
    assert figures["rows"] == {"ledger": 12, "unused": 0}
    assert (figures["ledger_wrong"], figures["rows_wrong"]) == (0, 0)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    wrong = saved(entries, rows_of(own, (2, 5)), rows_of(shared, (3, 9)))
    assert audited(row_ledger(), wrong)["rows_wrong"] == 6
    missing = audited(row_ledger(), saved(entries, rows_of(own, (2, 5))))
    assert (missing["rows"]["ledger"], missing["rows_wrong"]) == (6, 6)


def test_a_learning_rate_that_no_step_had_is_left_out() -> None:
    core = ended()
    core.job.callback_progress.rates = [DecidedRate(2, 0.5, 1), DecidedRate(4, 0.25, 3)]
    rates = report(core.job, ledger(), seen(), 4.0)["callbacks"]["learning_rates"]
    assert [rate["first_step"] for rate in rates] == [2]


def test_the_figures_of_a_job() -> None:
    figures = report(ended().job, ledger(), seen(), 4.0)
    assert (figures["job"], figures["run_id"], figures["consistency"]) == ("ledger", "run-1", "ssp:8")
    assert (figures["steps_total"], figures["steps_applied"], figures["skipped_steps"]) == (4, [4, 4], 1)
    assert (figures["duplicate_pushes"], figures["refused_pushes"]) == (7, 1)
    assert (figures["examples_per_s"], figures["wall_s"]) == (16.0, 3.0)
    assert (figures["training_loss"], figures["held_out"]) == (0.5, {"accuracy": 0.75, "loss": 0.125})
    assert (figures["staleness"], figures["step_lag"]) == ({"p50": 1, "p95": 2, "mean": 0.75, "max": 2}, {"max": 3})
    assert figures["data"] == {"examples": 6, "held_out": 0, "input_shape": [1], "classes": 2, "warnings": []}
    assert figures["dropped_examples"] == 0
    assert figures["parameters"] == 12
    assert figures["network"] == {
        "transfer_s": 2.0,
        "waited_s": 1.5,
        "overlapped_share": 0.25,
        "step_share": 0.4,
        "workers": {"guest-0": 0.4},
        "pipeline": "cluster.pipeline_depth = 1 would hide up to 40 % of a step, and make each gradient a step staler",
    }
    assert figures["bytes"] == {
        "pushed": 50,
        "pushed_float32": 200,
        "pulled": 150,
        "pull_unmoved": 50,
        "saved_share": 0.5,
    }
    assert (figures["shards"], figures["workers"]) == (2, 2)


def test_a_done_job_s_report_is_of_its_last_checkpoint_whatever_becomes_of_a_shard() -> None:  # P25
    core = ended()
    final = core.job.due_checkpoint()
    assert final is not None
    assert (final.steps, final.final, final.metrics) == (4, True, {"accuracy": 0.75, "loss": 0.125})
    announce(core, 1, 2)
    assert core.job.evaluations.results() == {}, "what is there now is not what was judged"
    figures = report(core.job, ledger(), StatusView("ledger", "async"), 4.0, final, (4, 4))
    assert (figures["state"], figures["steps_applied"], figures["held_out"]["accuracy"]) == ("done", [4, 4], 0.75)


def test_a_job_that_failed_before_its_first_step_has_a_report_too() -> None:
    core = core_of()
    core.job.fail("no disk")
    figures = report(core.job, ledger(), StatusView("ledger", "async"), 9.0)
    assert (figures["state"], figures["reason"], figures["steps_applied"]) == ("failed", "no disk", [0, 0])
    assert (figures["training_loss"], figures["held_out"]) == (None, {}), "a training loss is no held-out loss"
    assert (figures["examples_per_s"], figures["wall_s"], figures["staleness"]["max"]) == (None, 0.0, 0)
    assert (figures["network"]["overlapped_share"], figures["bytes"]["saved_share"]) == (None, None)


def test_a_loss_that_is_not_finite_is_none() -> None:
    core = ended()
    assert core.job.evaluations.latest is not None
    core.job.evaluations.latest.metrics = {"loss": math.nan, "accuracy": math.inf}
    figures = report(core.job, ledger(), seen(), 4.0)
    assert figures["held_out"] == {"loss": None, "accuracy": None}


def test_weights_are_written_whole(tmp_path: Path) -> None:
    weights = {"b": np.ones((3, 2), np.float32).T, "a": np.arange(3, dtype=np.float32)}
    path = save_weights(tmp_path, weights, "run-1")
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"run_id": "run-1"}
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118 (no mapping)
            name: value.tolist() for name, value in weights.items()
        }
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_preprocessing_is_written_beside_the_weights(tmp_path: Path) -> None:
    save_preprocessing(tmp_path, None)
    assert list(tmp_path.iterdir()) == []
    saved = Preprocessing(input_shape=(2,), target=ClassTarget(classes=("no", "yes")))
    save_preprocessing(tmp_path, saved)
    assert [entry.name for entry in tmp_path.iterdir()] == ["preprocessing.json"]
    assert read_preprocessing(tmp_path / "preprocessing.json") == saved


def test_the_report_is_written_whole_and_says_where_the_weights_are(tmp_path: Path) -> None:
    save_report(tmp_path, {"job": "small", "state": "failed"})
    found = json.loads((tmp_path / REPORT_FILE).read_text())
    assert found == {"job": "small", "state": "failed", "run_dir": str(tmp_path), "weights": None}
    save_report(tmp_path, {"job": "small", "state": "done"})
    found = json.loads((tmp_path / REPORT_FILE).read_text())
    assert found["weights"] == str(tmp_path / "weights.safetensors")
    assert [entry.name for entry in tmp_path.iterdir()] == [REPORT_FILE]
