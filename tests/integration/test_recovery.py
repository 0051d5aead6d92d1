"""Whole jobs whose shards, coordinator, or all processes die, and which go on without losing or repeating a step."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_run import ROOT, ClusterRun, eventually, sets
from safetensors.numpy import load_file

Start = Callable[..., ClusterRun]
OFTEN = sets(checkpoint__every_s=0.5)
LEDGER = ["examples/ledger.toml", *OFTEN, *sets(job__epochs=4)]
DIGITS = ["examples/digits.toml", "--consistency", "sync:4", *OFTEN]
DIGITS += sets(job__epochs=120, evaluation__every_epochs=20)  # longer than it takes to start a command


@pytest.fixture(scope="module")
def faultless_digest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the digest that DIGITS ends with when nothing goes wrong."""
    run = ClusterRun(tmp_path_factory.mktemp("faultless") / "run", DIGITS, ROOT)
    yield run.report()["weights_sha256"]
    run.clean_up()


def assert_balanced(run: ClusterRun, shards: int = 2) -> dict[str, object]:
    """The job succeeds, and every example was counted once by every shard."""
    report = run.report()
    assert report["ledger_wrong"] == 0
    assert report["steps_applied"] == [report["steps_total"]] * shards
    assert not run.left_over()
    return report


def command(*words: str) -> str:
    """Run a command of the command line and return what it prints."""
    ran = subprocess.run(
        [sys.executable, "-m", "parashard", *words], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def restored(run: ClusterRun, shard: int) -> list[str]:
    """Return what a shard's lives began from, in order."""
    return re.findall(r'event=restored what="([^"]*)"', (run.dir / "logs" / f"shard-{shard}.log").read_text())


def checkpoints(run: ClusterRun) -> list[dict[str, object]]:
    return json.loads(command("checkpoint", "ls", str(run.dir), "--json"))


def test_a_killed_shard_goes_on_from_its_checkpoint(start_run: Start) -> None:  # P1, P3
    run = start_run(*LEDGER)
    run.wait_for_steps(800)
    run.kill("ps_server", "1")
    report = assert_balanced(run)
    assert report["shard_restarts"] == 1
    assert "restored p1/s1/i1/c" in restored(run, 1)[1]


def test_a_killed_coordinator_is_told_by_the_others(start_run: Start) -> None:
    run = start_run(*LEDGER)
    run.wait_for_steps(800)
    run.kill("coordinator", "coordinator")
    report = assert_balanced(run)
    assert report["coordinator_restarts"] == 1
    assert report["worker_restarts"] == 0, "workers wait and join again"
    assert len(restored(run, 0)) == 1, "shards keep what they have"


def test_a_job_of_which_nothing_lives_is_resumed(start_run: Start) -> None:  # P2
    run = start_run(*LEDGER)
    run.wait_for_steps(1000)
    run.process.kill()
    eventually(lambda: not run.left_over(), "every process has noticed", 10.0)
    again = start_run(*LEDGER, "--resume", run_dir=run.dir)
    assert_balanced(again)
    assert "restored p1/s0/i1/c" in restored(again, 0)[1]


def test_rounds_end_with_the_same_bits_whatever_is_killed(start_run: Start, faultless_digest: str) -> None:  # P12
    run = start_run(*DIGITS)
    run.wait_for_steps(300)
    run.kill("ps_server", "0")
    run.wait_for_steps(600)
    run.kill("coordinator", "coordinator")
    run.wait_for_steps(900)
    run.kill("ps_server", "1")
    run.kill("worker", "worker-0")
    report = run.report()
    assert report["weights_sha256"] == faultless_digest
    assert report["rollbacks"] >= 1
    assert report["shard_restarts"] == 2, "a return to a round is none"


def test_rounds_need_no_rollback_with_a_log(start_run: Start, faultless_digest: str) -> None:  # P18
    run = start_run(*DIGITS, *sets(checkpoint__durability="log"))
    run.wait_for_steps(600)
    run.kill("ps_server", "0")
    report = run.report()
    assert report["weights_sha256"] == faultless_digest
    assert report["rollbacks"] == 0
    assert re.search(r"replayed [1-9]\d* pushes of the log", restored(run, 0)[1])


def test_a_drained_checkpoint_goes_on_with_another_number_of_shards(
    start_run: Start, faultless_digest: str, tmp_path: Path
) -> None:  # P8
    run = start_run(*DIGITS)
    run.wait_for_steps(300)
    assert re.match(r"j1: \d+ steps on every shard", command("checkpoint", "create", str(run.dir)))
    run.process.send_signal(signal.SIGINT)
    run.wait()
    reported = (run.dir / "report.json").read_text()
    refused = start_run(*DIGITS, "--resume", "--shards", "3", run_dir=run.dir)
    refused.wait()
    assert refused.process.returncode == 2
    assert "give the rest up: --from-checkpoint j1" in refused.complaint()
    assert (run.dir / "report.json").read_text() == reported, "what was refused has changed nothing"
    assert checkpoints(run), "nor has it changed where its checkpoints are"
    wider = start_run(*DIGITS, "--resume", "--shards", "3", "--from-checkpoint", "j1", run_dir=run.dir)
    wider.wait_for_steps(450)
    command("checkpoint", "create", str(run.dir))
    wider.process.kill()
    eventually(lambda: not wider.left_over(), "every process has noticed", 10.0)
    narrower = start_run(*DIGITS, "--resume", "--shards", "1", "--from-checkpoint", "j2", run_dir=run.dir)
    assert narrower.report()["weights_sha256"] == faultless_digest
    assert "cut out of j1" in restored(narrower, 2)[0]
    assert "every byte verified" in command("checkpoint", "verify", str(run.dir))
    exported = tmp_path / "model.safetensors"
    command("checkpoint", "export", str(run.dir), "--output", str(exported))
    final = load_file(run.dir / "weights.safetensors")
    assert {name: a.tobytes() for name, a in load_file(exported).items()} == {n: a.tobytes() for n, a in final.items()}


def test_a_changed_job_does_not_go_on(start_run: Start) -> None:  # P2
    run = start_run(*LEDGER, *sets(job__epochs=1))
    run.report()
    changed = start_run(*LEDGER, *sets(job__epochs=1, job__seed=9), "--resume", run_dir=run.dir)
    changed.wait()
    assert changed.process.returncode == 2
    assert "keys that differ: job.seed" in changed.complaint()


def test_two_launchers_do_not_share_a_run(start_run: Start) -> None:  # P3
    run = start_run(*LEDGER)
    run.wait_for_steps(100)
    second = start_run(*LEDGER, "--resume", run_dir=run.dir)
    second.wait()
    assert second.process.returncode == 2
    assert "another `parashard run` works in it" in second.complaint()
    other = start_run(*LEDGER, *sets(checkpoint__url=str(run.dir / "checkpoints")))
    other.wait()
    assert other.process.returncode == 2
    assert "--resume takes it up" in other.complaint()
    assert assert_balanced(run)["coordinator_restarts"] == 0, "neither has fenced it"


def test_a_notice_lets_every_service_save_and_end_with_0(start_run: Start) -> None:
    run = start_run(*LEDGER, *sets(checkpoint__every_s=0))
    run.wait_for_steps(500)
    run.kill("ps_server", "0", signal.SIGTERM)
    run.kill("worker", "worker-0", signal.SIGTERM)
    for process in ("worker-0", "shard-0"):
        ended = f"{process} ended: exit code 0"
        eventually(lambda ended=ended: any(ended in event for event in run.status().events), ended)
    run.kill("coordinator", "coordinator", signal.SIGTERM)
    report = assert_balanced(run)
    assert report["coordinator_restarts"] == 1
    saved = re.search(r"restored p1/s0/i1/c1 with (\d+) steps", restored(run, 0)[1])
    assert saved is not None
    assert int(saved[1]) >= 500


@pytest.mark.parametrize(("module", "label"), [("ps_server", "0"), ("worker", "worker-0")])
def test_what_lives_and_gives_no_sign_of_it_is_replaced(start_run: Start, module: str, label: str) -> None:
    run = start_run(*LEDGER, *sets(job__epochs=12, cluster__silence_s=3.0, cluster__lease_ttl_s=1.0))
    run.wait_for_steps(500)
    run.kill(module, label, signal.SIGSTOP)
    report = assert_balanced(run)
    assert report["shard_restarts" if module == "ps_server" else "worker_restarts"] == 1
    assert "given no sign of it for 3 s: it is killed" in (run.dir / "logs" / "coordinator.log").read_text()


def test_a_full_disk_stops_no_training(start_run: Start, tmp_path: Path) -> None:
    run = start_run(*LEDGER, *sets(job__epochs=6))
    run.wait_for_steps(300)
    folder = run.dir / "checkpoints" / "shards"
    aside = run.dir / "checkpoints" / "aside"
    eventually(folder.is_dir, "a checkpoint begins")
    os.rename(folder, aside)
    folder.write_text("not a folder: every write below it fails")
    run.wait_for_steps(1500)
    status = run.status()
    assert sum(shard.record.failed_checkpoints for shard in status.shards) >= 1
    assert all(shard.record.checkpoint_error for shard in status.shards)
    folder.unlink()
    os.rename(aside, folder)
    assert_balanced(run)


def test_a_run_keeps_its_checkpoints_in_an_object_store(start_run: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="NO TEST OF S3: install parashard[s3]")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for key, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_ACCESS_KEY_ID", "testing"),
            ("AWS_SECRET_ACCESS_KEY", "testing"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(key, value)
        import botocore.session

        botocore.session.get_session().create_client("s3").create_bucket(Bucket="checkpoints")
        run = start_run(*LEDGER, *sets(checkpoint__url="s3://checkpoints/run-7", checkpoint__every_s=1.0))
        run.wait_for_steps(100)
        eventually(lambda: any(s.record.checkpoints for s in run.status().shards[1:]), "a checkpoint is stored")
        run.kill("ps_server", "1")
        assert_balanced(run)
        assert {row["id"] for row in checkpoints(run)} >= {"j1"}
        assert "restored p1/s1/i1/c" in restored(run, 1)[1]
    finally:
        server.stop()
