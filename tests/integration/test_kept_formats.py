"""Runs of every format that was ever kept go on, and what a newer version wrote is refused by name.

`tests/fixtures/format_1/` was written once, by `support/format_fixture.py`. A change that breaks these tests is a
change of format: the new one gets a number and a fixture of its own, and this one is still read, or refused by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.encoding import sha256_of
from parashard.checkpoints.state import whole_model
from parashard.checkpoints.verify import damage_in_job, damage_in_shard
from parashard.client.proto_conversion import plan_message
from parashard.errors import NewerFormat
from parashard.job.load import job_of_run
from parashard.process.run_files import CHECKPOINTS, JOB_FILE, REPORT_FILE
from parashard.store import open_store
from parashard_coordinator.endpoints.history import stored_rows
from parashard_coordinator.run.store import RunStore
from support import format_fixture
from support.cluster_run import ClusterRun
from support.command_line import run_command
from support.format_fixture import DRAINED, PUSHED, SAVED, STEPS, ledger_after
from support.resolved_job import resolved_here
from support.shard_process import ShardProcess

KEPT = Path(__file__).resolve().parents[1] / "fixtures" / "format_1"
SHARD_MANIFEST = "shards/p0001/s0000/i00000001-c00000002/manifest.json"
LOGS = f"{CHECKPOINTS}/log/"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a copy of the run."""
    return Path(shutil.copytree(KEPT, tmp_path / "run"))


def process_of(run: Path, shard: int) -> ShardProcess:
    """Start a shard of the run, as a coordinator of this version would have it."""
    job = job_of_run(run / JOB_FILE).job
    resolved = resolved_here(job)
    store = open_store(str(run / CHECKPOINTS))
    stored = Catalogue(store).run()
    assert stored is not None
    told = pb.GetJobReply(
        run_id=stored.run_id,
        job_digest=stored.job_digest,
        job_toml=stored.job_toml,
        plan=plan_message(Catalogue(store).plan(1).to_plan()),
        steps_total=STEPS,
        data_fingerprint=resolved.spec.fingerprint,
    )
    return ShardProcess(store, shard, reply=told)


def newer(content: bytes) -> bytes:
    """Return a record as a later version would write it: of format 2, with a field that this one does not know."""
    whole = json.loads(content)
    body = json.dumps({**whole["body"], "format": 2, "later": 1}, sort_keys=True, separators=(",", ":")).encode()
    return b'{"body":' + body + f',"kind":"{whole["kind"]}","sha256":"{sha256_of(body)}"}}'.encode()


def with_present_keys(job: str) -> str:
    """Return the text of a job file of format 1 with the keys of today."""
    for removed in (
        'staleness_damping = "none"\ndelay_compensation = 0.0\n',
        'durability = "log"\nlog_fsync = false\n',
    ):
        assert removed in job
        job = job.replace(removed, "")
    return job.replace('host = "127.0.0.1"\n', 'host = "127.0.0.1"\ninterface = ""\n')


def reduced(told: Any, before: Any) -> Any:
    """Return a record with only the keys that an earlier one has."""
    if isinstance(told, dict) and isinstance(before, dict):
        return {key: reduced(told[key], before[key]) for key in before}
    return told


def test_the_writer_of_today_writes_the_same_bytes(tmp_path: Path) -> None:
    format_fixture.write(tmp_path)
    written, kept = ({p.relative_to(d): p.read_bytes() for p in d.rglob("*") if p.is_file()} for d in (tmp_path, KEPT))
    kept = {path: content for path, content in kept.items() if not str(path).startswith(LOGS)}
    assert set(written) == set(kept)
    kept[Path(JOB_FILE)] = with_present_keys(kept[Path(JOB_FILE)].decode()).encode()
    for path in (REPORT_FILE, "history.jsonl", f"{CHECKPOINTS}/coordinator/i00000001.json", f"{CHECKPOINTS}/run.json"):
        told, before = json.loads(written.pop(Path(path))), json.loads(kept[Path(path)])
        told, before = told.get("body", told), before.get("body", before)
        if "job_toml" in before:
            before["job_toml"] = with_present_keys(before["job_toml"])
        assert reduced(told, before) == before, "it may gain keys"
    assert {path: content for path, content in written.items() if kept.get(path) != content} == {}


@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_goes_on_from_its_checkpoint_and_says_that_it_does_not_read_its_log(kept: Path, shard: int) -> None:
    process = process_of(kept, shard)
    assert list(process.shard.updates.applied.intervals()) == [(0, SAVED[shard])]
    rows = [placed.partition for placed in process.shard.storage.layout]
    expected = [ledger_after(SAVED[shard])[p.row_start : p.row_stop].ravel() for p in rows]
    assert np.array_equal(process.shard.storage.weights, np.concatenate(expected))
    assert process.shard.identity.incarnation == 2
    assert process.host.restored.endswith(
        "; steps that only a log of pushes has are computed again: logs are no longer read"
    )
    process.push(SAVED[shard])
    process.checkpointer.take()
    assert "log" not in process_of(kept, shard).host.restored, "said once"


def test_its_drained_checkpoint_is_whole_and_has_the_model(kept: Path) -> None:
    catalogue = Catalogue(open_store(str(kept / CHECKPOINTS)))
    assert list(damage_in_job(catalogue, 1)) == []
    assert [text for id_ in catalogue.checkpoints() for text in damage_in_shard(catalogue, id_)] == []
    model = whole_model(catalogue.store, catalogue.job_manifest(1))
    assert np.array_equal(model["ledger"], ledger_after(DRAINED))


def test_a_coordinator_takes_it_up_and_reads_what_was_decided_and_drawn(kept: Path) -> None:
    run_store = RunStore(open_store(str(kept / CHECKPOINTS)), 2)
    job = job_of_run(kept / JOB_FILE).job
    resolved = resolved_here(job)
    assert run_store.open_plan(resolved.plan)[0].version == 1
    saved = run_store.load_saved()
    assert saved is not None
    assert (saved.target, saved.examples) == (STEPS, 4 * PUSHED[1])
    assert [row["steps_complete"] for row in stored_rows(kept / "history.jsonl")] == [PUSHED[1]]


def test_commands_show_it(kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(kept.parent)
    kept.parent.joinpath("runs").mkdir()
    kept.rename("runs/run")
    assert run_command(monkeypatch, capsys, "checkpoint", "verify", "runs/run").exit_code == 0
    (listed,) = json.loads(run_command(monkeypatch, capsys, "runs", "list", "--json").out)
    assert (listed["state"], listed["job"], listed["steps"], listed["steps_total"]) == ("stopped", "format", 7, STEPS)


def test_a_run_of_it_is_resumed(start_run: Callable[..., ClusterRun], kept: Path) -> None:
    run = start_run(str(kept / JOB_FILE), "--resume", run_dir=kept)
    report = run.report()
    assert (report["ledger_wrong"], report["steps_applied"]) == (0, [STEPS, STEPS])
    for shard in range(2):
        said = (kept / "logs" / f"shard-{shard}.log").read_text()
        assert "restored p1/s" in said
        assert "computed again: logs are no longer read" in said


def test_a_newer_checkpoint_is_refused_and_not_passed_over_for_an_older_one(kept: Path) -> None:
    manifest = kept / CHECKPOINTS / SHARD_MANIFEST
    manifest.chmod(0o600)
    manifest.write_bytes(newer(manifest.read_bytes()))
    with pytest.raises(NewerFormat, match=r"c00000002/manifest\.json: a shard-manifest of format 2, .* reads format 1"):
        process_of(kept, 0)


@pytest.mark.parametrize("name", ["run.json", "plans/0001.json", "jobs/j00000001.json"])
def test_a_newer_record_ends_a_command_with_the_sentence(
    kept: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = kept / CHECKPOINTS / name
    record.write_bytes(newer(record.read_bytes()))
    ran = run_command(monkeypatch, capsys, "checkpoint", "verify", str(kept))
    assert ran.exit_code == 2
    assert f"{name}: a " in ran.err
    assert "of format 2, and this version reads format 1: a newer version of parashard wrote it" in ran.err


def test_a_run_of_a_newer_version_is_not_taken_up(start_run: Callable[..., ClusterRun], kept: Path) -> None:
    manifest = kept / CHECKPOINTS / SHARD_MANIFEST
    manifest.write_bytes(newer(manifest.read_bytes()))
    run = start_run(str(kept / JOB_FILE), "--resume", run_dir=kept)
    run.wait()
    assert run.process.returncode == 2
    assert "of format 2, and this version reads format 1" in run.complaint()
