"""Whole jobs whose shards, coordinator, or all processes die, and which go on without losing or repeating a step.

Rule P10.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from parashard._proto import coordinator_pb2 as pb
from parashard.job.load import load_job
from parashard.store import open_store
from support.cluster_run import DEADLINE_S, ClusterRun, eventually, sets
from support.command_run import ROOT
from support.long_job import LongJob

Start = Callable[..., ClusterRun]
OFTEN = sets(checkpoint__every_s=0.5)
LEDGER = [*OFTEN, *sets(job__epochs=2)]
DIGITS = ["--consistency", "sync:4", *OFTEN, *sets(job__epochs=15, evaluation__every_epochs=10)]
QUICK_LEDGER = 1000  # steps of 2048
QUICK_DIGITS = 200  # steps of 675


@pytest.fixture
def ledger(tmp_path: Path) -> LongJob:
    """Return a ledger that does not end before it is let."""
    return LongJob(tmp_path, "ledger.toml", QUICK_LEDGER)


@pytest.fixture
def digits(tmp_path: Path) -> LongJob:
    """Return digits that are not all learnt before they are let."""
    return LongJob(tmp_path, "digits.toml", QUICK_DIGITS)


@pytest.fixture(scope="module")
def faultless_digest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the digest that DIGITS ends with when nothing goes wrong."""
    run = ClusterRun(tmp_path_factory.mktemp("faultless") / "run", ["examples/digits.toml", *DIGITS], ROOT)
    yield run.report()["weights_sha256"]
    run.clean_up()


def assert_balanced(run: ClusterRun) -> dict[str, object]:
    """The job succeeds, and every example was counted once by every shard."""
    report = run.report()
    assert report["ledger_wrong"] == 0
    assert not run.left_over()
    return report


def command(*words: str) -> str:
    """Run a command of the command line and return what it prints."""
    ran = subprocess.run(
        [sys.executable, "-m", "parashard", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def report_in(run: ClusterRun) -> str:
    """Return the report; empty: a run that was asked to end was too busy to write one."""
    path = run.dir / "report.json"
    return path.read_text() if path.exists() else ""


def restored(run: ClusterRun, shard: int) -> list[str]:
    """Return what a shard's incarnations began from, in order."""
    return re.findall(r'event=restored what="([^"]*)"', (run.dir / "logs" / f"shard-{shard}.log").read_text())


def checkpoints(run: ClusterRun) -> list[dict[str, object]]:
    return json.loads(command("checkpoint", "ls", str(run.dir), "--json"))


def saved(shard: int) -> Callable[[pb.GetStatusReply], bool]:
    """Tell of a status whether a shard has stored a checkpoint."""
    return lambda status: status.shards[shard].record.checkpoints > 0


def test_a_killed_coordinator_is_reported_by_the_others(start_run: Start, ledger: LongJob) -> None:
    run = start_run(ledger.file, *LEDGER)
    run.wait_for_steps(400)
    run.kill("coordinator", "coordinator")
    ledger.let_end()
    report = assert_balanced(run)
    assert report["coordinator_restarts"] == 1
    assert report["worker_restarts"] == 0, "workers wait and join again"
    assert len(restored(run, 0)) == 1, "shards keep what they have"


def test_a_job_without_running_processes_is_resumed(start_run: Start, ledger: LongJob) -> None:  # P2
    run = start_run(ledger.file, *LEDGER)
    run.until(saved(0), "a checkpoint is stored")
    run.process.kill()
    run.wait_until_all_exited()
    ledger.let_end()
    again = start_run(ledger.file, *LEDGER, "--resume", run_dir=run.dir)
    assert assert_balanced(again)["coordinator_restarts"] == 0, "a resume is no restart"
    assert "restored p1/s0/i1/c" in restored(again, 0)[1]


@pytest.mark.smoke
def test_rounds_end_with_the_same_bits_whatever_is_killed(
    start_run: Start, digits: LongJob, faultless_digest: str
) -> None:  # P12
    run = start_run(digits.file, *DIGITS)
    run.wait_for_steps(100)
    run.kill("shard", "0")
    run.wait_for_steps(QUICK_DIGITS)
    digits.quick_until(QUICK_DIGITS + 200)
    run.wait_for_steps(QUICK_DIGITS + 100)
    run.kill("coordinator", "coordinator")
    run.wait_for_steps(QUICK_DIGITS + 200)
    digits.quick_until(QUICK_DIGITS + 400)
    run.wait_for_steps(QUICK_DIGITS + 300)
    run.kill("shard", "1")
    run.kill("worker", "worker-0")
    digits.let_end()
    report = run.report()
    assert report["weights_sha256"] == faultless_digest
    assert report["rollbacks"] >= 1
    assert report["shard_restarts"] == 2, "a return to a round is none"
    assert report["coordinator_restarts"] == 1
    assert report["worker_restarts"] == 1, "the other waits and joins again"


def test_a_drained_checkpoint_goes_on_with_another_number_of_shards(
    start_run: Start, digits: LongJob, faultless_digest: str, tmp_path: Path
) -> None:  # P8
    digits.quick_until(100)
    run = start_run(digits.file, *DIGITS)
    run.wait_for_steps(100)
    drained = re.match(r"j1: (\d+) steps on every shard", command("checkpoint", "create", str(run.dir)))
    assert drained is not None
    j1_steps = int(drained[1])
    digits.quick_until(j1_steps + 100)
    run.wait_for_steps(j1_steps + 50)  # which the shards save when they are asked to end
    run.process.send_signal(signal.SIGINT)
    run.wait()
    reported = report_in(run)
    refused = start_run(digits.file, *DIGITS, "--resume", "--shards", "3", run_dir=run.dir)
    refused.wait()
    assert refused.process.returncode == 2
    assert "give the rest up: `parashard resume" in refused.complaint()
    assert report_in(run) == reported, "what was refused has changed nothing"
    assert checkpoints(run), "nor has it changed where its checkpoints are"
    wider = start_run(digits.file, *DIGITS, "--resume", "--shards", "3", "--from-checkpoint", "j1", run_dir=run.dir)
    wider.wait_for_steps(j1_steps + 50)
    command("checkpoint", "create", str(run.dir))
    wider.process.kill()
    wider.wait_until_all_exited()
    digits.let_end()
    narrower = start_run(digits.file, *DIGITS, "--resume", "--shards", "1", "--from-checkpoint", "j2", run_dir=run.dir)
    assert narrower.report()["weights_sha256"] == faultless_digest
    assert "resharded j1" in restored(narrower, 2)[0]
    assert "every byte verified" in command("checkpoint", "verify", str(run.dir))
    exported = tmp_path / "model.safetensors"
    command("checkpoint", "export", str(run.dir), "--output", str(exported))
    final = load_file(run.dir / "weights.safetensors")
    assert {name: a.tobytes() for name, a in load_file(exported).items()} == {n: a.tobytes() for n, a in final.items()}


def test_a_changed_job_does_not_go_on(start_run: Start, ledger: LongJob) -> None:  # P2
    ledger.let_end()
    run = start_run(ledger.file, *LEDGER, *sets(job__epochs=1))
    run.report()
    changed = start_run(ledger.file, *LEDGER, *sets(job__epochs=1, job__seed=9), "--resume", run_dir=run.dir)
    changed.wait()
    assert changed.process.returncode == 2
    assert "job.seed is 0 in the run, 9 now" in changed.complaint()


def test_a_run_that_began_with_flags_goes_on_without_them(start_run: Start, ledger: LongJob, tmp_path: Path) -> None:
    run = start_run(ledger.file, *LEDGER, *sets(job__epochs=3, job__seed=7))
    run.wait_for_steps(100)
    run.process.send_signal(signal.SIGINT)
    run.wait()
    ledger.let_end()
    report = json.loads(command("resume", str(run.dir), "--json").splitlines()[-1])
    assert (report["state"], report["ledger_wrong"]) == ("done", 0)
    began = load_job(run.dir / "job.toml", environ={}).job.job
    assert (began.epochs, began.seed) == (3, 7)
    assert Path(report["weights"]) == Path(report["run_dir"], "weights.safetensors")
    assert Path(report["weights"]).exists()
    assert report["run_dir"] == str(run.dir)


def test_two_launchers_do_not_share_a_run(start_run: Start, ledger: LongJob) -> None:  # P3
    run = start_run(ledger.file, *LEDGER)
    run.wait_for_steps(100)
    second = start_run(ledger.file, *LEDGER, "--resume", run_dir=run.dir)
    second.wait()
    assert second.process.returncode == 2
    assert "another `parashard run` works in it" in second.complaint()
    other = start_run(ledger.file, *LEDGER, *sets(checkpoint__url=str(run.dir / "checkpoints")))
    other.wait()
    assert other.process.returncode == 2
    assert "--resume takes it up" in other.complaint()
    ledger.let_end()
    assert assert_balanced(run)["coordinator_restarts"] == 0, "neither has fenced it"


def test_a_notice_lets_every_service_save_and_end_with_0(start_run: Start, ledger: LongJob) -> None:
    run = start_run(ledger.file, *LEDGER, *sets(checkpoint__every_s=0))
    run.wait_for_steps(500)
    run.kill("shard", "0", signal.SIGTERM)
    run.kill("worker", "worker-0", signal.SIGTERM)
    for process in ("worker-0", "shard-0"):
        run.wait_for_event(f"{process} ended: exit code 0")
    run.kill("coordinator", "coordinator", signal.SIGTERM)
    ledger.let_end()
    report = assert_balanced(run)
    assert report["coordinator_restarts"] == 1
    saved = re.search(r"restored p1/s0/i1/c1 with ([\d,]+) steps?", restored(run, 0)[1])
    assert saved is not None
    assert int(saved[1].replace(",", "")) >= 500


def test_a_silent_live_worker_is_replaced(start_run: Start, ledger: LongJob) -> None:
    run = start_run(ledger.file, *LEDGER, *sets(cluster__silence_s=3.0, cluster__lease_ttl_s=1.0))
    run.wait_for_steps(500)
    run.kill("worker", "worker-0", signal.SIGSTOP)
    run.wait_for_event("is silent for 3 s: it is killed")
    run.until(lambda status: any(w.name == "worker-0" and w.incarnation > 1 for w in status.workers), "it is back")
    ledger.let_end()
    report = assert_balanced(run)
    assert report["worker_restarts"] == 1
    assert "is silent for 3 s: it is killed" in (run.dir / "logs" / "coordinator.log").read_text()


def test_a_shard_that_hangs_while_the_coordinator_dies_is_replaced(start_run: Start, ledger: LongJob) -> None:  # P22
    run = start_run(ledger.file, *LEDGER, *sets(cluster__silence_s=3.0))
    run.wait_for_steps(500)
    run.kill("shard", "0", signal.SIGSTOP)
    run.kill("coordinator", "coordinator")
    run.until(lambda status: status.shards[0].record.incarnation > 1, "the shard is there again")
    ledger.let_end()
    report = assert_balanced(run)
    assert (report["shard_restarts"], report["worker_restarts"]) == (1, 0)


@contextmanager
def stopped_shards(run: ClusterRun) -> Iterator[None]:
    """Let no shard write, nor make its folder again, while files are moved."""
    for shard in ("0", "1"):
        run.kill("shard", shard, signal.SIGSTOP)
    yield
    for shard in ("0", "1"):
        run.kill("shard", shard, signal.SIGCONT)


def test_a_full_disk_stops_no_training(start_run: Start, ledger: LongJob) -> None:
    ledger.quick_until(300)
    run = start_run(ledger.file, *LEDGER)
    run.wait_for_steps(300)
    folder = run.dir / "checkpoints" / "shards"
    aside = run.dir / "checkpoints" / "aside"
    eventually(folder.is_dir, "a checkpoint begins")
    with stopped_shards(run):
        os.rename(folder, aside)
        folder.write_text("not a folder: every write below it fails")
    ledger.quick_until(1000)
    run.wait_for_steps(1000)
    status = run.until(
        lambda status: all(shard.record.checkpoint_error for shard in status.shards), "every shard tells of its failure"
    )
    assert all(shard.record.failed_checkpoints for shard in status.shards)
    with stopped_shards(run):
        folder.unlink()
        os.rename(aside, folder)
    ledger.let_end()
    assert_balanced(run)


def test_a_run_keeps_its_checkpoints_in_an_object_store(start_run: Start, ledger: LongJob, s3_url: str) -> None:
    run = start_run(ledger.file, *LEDGER, *sets(checkpoint__url=s3_url, checkpoint__every_s=1.0))
    run.until(saved(1), "a checkpoint is stored")
    run.kill("shard", "1")
    ledger.let_end()
    assert_balanced(run)
    assert {row["id"] for row in checkpoints(run)} >= {"j1"}
    assert "restored p1/s1/i1/c" in restored(run, 1)[1]
    store = open_store(s3_url)
    for name in ("report.json", "weights.safetensors"):
        assert store.read(name, 1 << 20) == (run.dir / name).read_bytes()
