"""The runner: a job's processes really are struck while it runs, everything is lifted at its end, and it is reported.

The job is replaced by children that wait, ended once enough has struck; everything else is as in `parashard chaos`.
"""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.chaos import runner
from parashard.chaos.campaign import LENGTHS_S
from parashard.chaos.proxied_cluster import ProxiedCluster, SmallDisk
from parashard.chaos.runner import FLAGS, kinds_of, run_chaos
from parashard.display.live import JobView
from parashard.errors import ConfigurationError
from parashard.job.load import LoadedJob, load_job
from parashard.launch.run import Outcome
from parashard.launch.runs import Run
from support.small_job import SMALL_JOB
from support.waiting import eventually

JOB = f"""{SMALL_JOB}
[cluster]
shards = 1
workers = 1
transport = "tcp"
"""

Job = Callable[[ProxiedCluster], None]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedJob:
    """Return a job of one shard and one worker, whose processes are modules that wait."""
    (tmp_path / "wait.py").write_text("import signal\nsignal.pause()\n")
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return load_job(tmp_path / "job.toml", environ={})


@pytest.fixture
def job_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[Job], None]:
    """Return a function that puts another job in the place of `run_job`'s, with the cluster ended as there."""

    def replace(job: Job) -> None:
        def run(run: Run, view: JobView, *, cluster: ProxiedCluster) -> Outcome:
            try:
                job(cluster)
            finally:
                cluster.end(0.0)
            return Outcome(0, {"state": "done"}, "every step is in", run.folder)

        monkeypatch.setattr(runner, "run_job", run)

    return replace


def keep_alive_until_struck(cluster: ProxiedCluster, times: int) -> None:
    """Start whatever does not run, until so much has struck."""
    struck = cluster.log_path("x").parent.parent / "strikes.jsonl"

    def so_much() -> bool:
        if len(struck.read_text().splitlines()) >= times:
            return True
        cluster.reap()
        for name in cluster.processes:
            if name not in cluster.running:
                cluster.start(name, "wait", [])
        return False

    eventually(so_much, f"{times} strikes", told=struck.read_text)


def test_a_job_is_struck_until_enough_has_happened_and_every_fault_is_reported(loaded, job_is, tmp_path, monkeypatch):
    job_is(lambda cluster: keep_alive_until_struck(cluster, 30))
    filled: list[str] = []  # the disk of this test is no small one
    monkeypatch.setattr(SmallDisk, "fill", lambda disk: filled.append("fill"))
    monkeypatch.setattr(runner, "check_small", lambda folder: filled.append("checked"))
    outcome = run_chaos(Run(loaded, tmp_path), JobView(), 5, 0.002, 30, tuple(LENGTHS_S))
    struck = [json.loads(line) for line in (tmp_path / "strikes.jsonl").read_text().splitlines()]
    assert outcome.report["state"] == "done"
    assert (outcome.report["seed"], outcome.report["transport"]) == (5, "tcp")
    assert list(outcome.report["faults"]) == list(LENGTHS_S)
    assert sum(outcome.report["faults"].values()) == 30 == len(struck)
    for kind, count in outcome.report["faults"].items():
        assert count == sum(fault["kind"] == kind for fault in struck)
    assert filled == ["checked", *["fill"] * outcome.report["faults"]["fill_disk"]]


def test_a_fault_that_never_happened_is_counted_as_zero(loaded, job_is, tmp_path):
    job_is(lambda cluster: keep_alive_until_struck(cluster, 0))
    outcome = run_chaos(Run(loaded, tmp_path), JobView(), 5, 0.002, 0, ("kill_worker", "delay"))
    assert outcome.report["faults"] == {"kill_worker": 0, "delay": 0}


def test_nothing_stays_paused_and_no_thread_is_left_when_the_job_ends(loaded, job_is, tmp_path, monkeypatch):
    resumed: list[str] = []
    true_signal = ProxiedCluster.signal

    def noted(cluster: ProxiedCluster, process: str, number: int) -> bool:
        if number == signal.SIGCONT:
            resumed.append(process)
        return true_signal(cluster, process, number)

    monkeypatch.setattr(ProxiedCluster, "signal", noted)
    monkeypatch.setitem(LENGTHS_S, "pause_worker", (60.0, 60.0))
    job_is(lambda cluster: keep_alive_until_struck(cluster, 1))
    run_chaos(Run(loaded, tmp_path), JobView(), 5, 0.001, 1, ("pause_worker",))
    assert resumed == ["worker-0"]
    assert {thread.name for thread in threading.enumerate()} & {"chaos", "proxy"} == set()


def test_a_job_that_fails_at_once_leaves_no_thread(loaded, monkeypatch, tmp_path):
    def refuse(*_: object, **__: object) -> Outcome:
        raise ConfigurationError("no")

    monkeypatch.setattr(runner, "run_job", refuse)
    with pytest.raises(ConfigurationError, match="no"):
        run_chaos(Run(loaded, tmp_path), JobView(), 5, 1.0, None, ("kill_worker",))
    assert {thread.name for thread in threading.enumerate()} & {"chaos", "proxy"} == set()


def test_without_a_target_for_the_faults_nothing_is_run(tmp_path, loaded):
    alone = load_job(loaded.path, [("cluster.workers", 0, "--workers")], environ={})
    with pytest.raises(ConfigurationError, match="have no target: 1 shards, 0 workers"):
        run_chaos(Run(alone, tmp_path), JobView(), 5, 1.0, None, ("kill_worker",))


@pytest.mark.parametrize("transport", ["auto", "shm"])
@pytest.mark.parametrize("kind", ["partition", "one_way", "reset", "delay", "duplicate"])
def test_links_are_not_struck_where_nothing_goes_through_them(tmp_path, loaded, transport, kind):
    past = load_job(loaded.path, [("cluster.transport", transport, "--set")], environ={})
    with pytest.raises(
        ConfigurationError, match=rf'cluster.transport is "{transport}", .*{kind} would strike; allowed'
    ):
        run_chaos(Run(past, tmp_path), JobView(), 5, 1.0, None, ("kill_worker", kind))
    assert not (tmp_path / "strikes.jsonl").exists()


def test_processes_are_struck_whatever_the_transport(tmp_path, loaded, job_is):
    past = load_job(loaded.path, [("cluster.transport", "shm", "--set")], environ={})
    job_is(lambda cluster: keep_alive_until_struck(cluster, 1))
    outcome = run_chaos(Run(past, tmp_path), JobView(), 5, 0.001, 1, ("kill_worker", "pause_shard"))
    assert outcome.report["transport"] == "shm"


def test_a_disk_that_is_not_small_is_not_filled(tmp_path, loaded, monkeypatch):
    monkeypatch.setattr("parashard.chaos.proxied_cluster.SMALL_BYTES_MAX", 1)
    with pytest.raises(ConfigurationError, match=r"--disk fills the file system of the run directory: .* allowed are"):
        run_chaos(Run(loaded, tmp_path), JobView(), 5, 1.0, None, ("fill_disk",))
    assert not (tmp_path / "strikes.jsonl").exists()


# --- what flags ask for ---


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        (([], []), set(LENGTHS_S) - {"fill_disk"}),
        ((["worker"], []), {"kill_worker"}),
        ((["worker", "coordinator"], []), {"kill_worker", "kill_coordinator"}),
        (([], ["--pause"]), {"pause_worker", "pause_shard", "pause_coordinator"}),
        (([], ["--hang"]), {"hang_worker", "hang_shard", "hang_coordinator"}),
        (([], ["--stray"]), {"stray_shard", "stray_coordinator"}),
        (([], ["--partition"]), {"partition", "one_way", "reset"}),
        (([], ["--delay"]), {"delay", "duplicate"}),
        ((["shard"], ["--delay"]), {"kill_shard", "delay", "duplicate"}),
        (([], ["--disk"]), {"fill_disk"}),
        ((["worker", "shard", "coordinator"], list(FLAGS)), set(LENGTHS_S)),
    ],
)
def test_flags_ask_for_kinds_and_none_for_all(flags, kinds):
    assert set(kinds_of(*flags)) == kinds
    assert list(kinds_of(*flags)) == [kind for kind in LENGTHS_S if kind in kinds], (
        "in a stable order: the seed's draws"
    )


def test_a_role_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match="--kill: found 'server'; allowed: worker, shard, coordinator"):
        kinds_of(["server"], [])
