"""A run in progress, in virtual time: when its coordinator is killed, and when what ended is given up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.display.live import JobView
from parashard.errors import ConfigurationError, JobFailed, NotReady, ParashardError, Unreachable
from parashard.job.load import load_job
from parashard.launch.local_cluster import ScriptCommand
from parashard.launch.running import Running
from parashard.launch.runs import Run
from parashard.launch.starting import Ended
from parashard.process.backoff import BACKOFF_MAX_S
from parashard.process.run_files import NEW_JOB_FILE, REPORT_FILE
from parashard.process.shell import ExitCode
from parashard.protocol.coordinator_client import ADDRESS_FILE
from parashard.security.identity import Role
from support.certificates import Certificates

JOB = Path(__file__).resolve().parents[3] / "examples" / "digits.toml"
PID = 17


class FakeCluster:
    """A coordinator that runs, and ends when a test says so; whatever is started, asked to end or killed is noted."""

    def __init__(self, launcher_address: str = "") -> None:
        self.launcher_address = launcher_address
        self.coming: dict[str, float] = {}
        self.words: dict[str, list[str]] = {}
        self.ended: list[Ended] = []
        self.noted: list[str] = []
        self.running = ["coordinator"]
        self.script: ScriptCommand | None = None

    def reap(self) -> list[Ended]:
        ended, self.ended = self.ended, []
        self.running = [name for name in self.running if name not in {child.name for child in ended}]
        return ended

    def pid(self, name: str) -> int:
        return PID + self.noted.count("start coordinator")  # one that is started again never gets to write its own

    def start(self, name: str, module: str, arguments: list[str]) -> None:
        self.noted.append(f"start {name}")
        self.running.append(name)
        self.words[name] = arguments

    def coming_ends(self) -> dict[str, float]:
        return {name: at_s for name, at_s in self.coming.items() if name in self.running}

    def ask_to_end(self, name: str) -> None:
        self.noted.append(f"ask {name}")

    def kill(self, name: str) -> None:
        self.noted.append(f"kill {name}")


class Clock:
    """A clock that a sleep moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Played:
    """A run whose coordinator answers as `answers(now_s)` says, with a state or an error."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / ADDRESS_FILE).write_text(json.dumps({"pid": PID, "address": "x:1", "run_id": "run-1"}))
        (folder / REPORT_FILE).write_text("{}")
        self.clock, self.cluster = Clock(), FakeCluster()
        monkeypatch.setattr(
            "parashard.launch.running.time", SimpleNamespace(monotonic=lambda: self.clock.now_s, sleep=self.clock.sleep)
        )
        loaded = load_job(JOB, environ={})
        self.silence_s = loaded.job.cluster.silence_s
        self.budget = loaded.job.cluster.max_restarts
        self.running = Running(Run(loaded, folder), self.cluster, JobView())  # type: ignore[arg-type]
        self.running._client = self  # type: ignore[assignment]
        self.running.accepted = True
        self.answers: Callable[[float], pb.JobState | ParashardError] = lambda now_s: pb.JOB_STATE_DONE

    def supervise(self, request: pb.SuperviseRequest, deadline_s: float) -> pb.SuperviseReply:
        answer = self.answers(self.clock.now_s)
        if isinstance(answer, ParashardError):
            raise answer
        return pb.SuperviseReply(state=answer)

    def get_status(self) -> pb.GetStatusReply:
        raise NotReady("not now")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path, monkeypatch)


def for_so_long(seconds: float, error: ParashardError) -> Callable[[float], Any]:
    return lambda now_s: error if now_s < seconds else pb.JOB_STATE_DONE


@pytest.mark.parametrize(
    ("error", "noted"),
    [(Unreachable("no answer"), ["kill coordinator"]), (NotReady("the caller's certificate expired"), [])],
    ids=["no answer", "it answers and refuses"],
)
def test_a_coordinator_is_killed_that_does_not_answer(run: Played, error: ParashardError, noted: list[str]) -> None:
    run.answers = for_so_long(1.5 * run.silence_s, error)
    assert run.running.until_over()[0] == pb.JOB_STATE_DONE
    assert run.cluster.noted == noted


def test_a_launcher_that_stood_still_itself_kills_no_coordinator(run: Played) -> None:  # P22
    def answers(now_s: float) -> pb.JobState | ParashardError:
        if now_s < 1000.0:  # stopped while it waits for the answer, whose deadline passes meanwhile
            run.clock.now_s = 1000.0
            return Unreachable("the deadline is over")
        return pb.JOB_STATE_DONE

    run.answers = answers
    assert run.running.until_over()[0] == pb.JOB_STATE_DONE
    assert run.cluster.noted == []


@pytest.mark.parametrize("code", [2, -9, 75])
def test_a_coordinator_that_does_not_come_back_is_given_up_some_time(run: Played, code: int) -> None:
    def ends(now_s: float) -> ParashardError:
        if len(run.cluster.noted) == starts[0]:
            starts[0] += 1
            run.cluster.ended = [Ended("coordinator", code, f"cannot listen (exit code {code})", starts[0])]
        return Unreachable("no answer")

    starts = [0]
    run.answers = ends
    with pytest.raises(ConfigurationError if code == 2 else JobFailed, match="cannot listen"):
        run.running.until_over()
    assert run.cluster.noted == ["start coordinator"] * run.budget
    assert run.running.failure_code == (ExitCode.CONFIGURATION if code == 2 else ExitCode.FAILED)


def test_a_coordinator_that_starts_slowly_is_not_silent_before_it_serves(run: Played, tmp_path: Path) -> None:
    """Nor are those after it: each was killed as soon as it served, until the budget was spent."""
    slow_s, serves_s = 1.5 * run.silence_s, [1e9]

    def answers(now_s: float) -> Any:
        if not run.cluster.noted:
            run.cluster.noted.append("died")
            run.cluster.ended = [Ended("coordinator", -9, "killed by SIGKILL", 1)]
            serves_s[0] = now_s + slow_s
        if now_s < serves_s[0]:
            return Unreachable("no answer")
        here = {"pid": run.cluster.pid("coordinator"), "address": "x:1", "run_id": "run-1"}
        (tmp_path / ADDRESS_FILE).write_text(json.dumps(here))
        return Unreachable("it serves and is busy") if now_s < serves_s[0] + run.silence_s / 2 else pb.JOB_STATE_DONE

    run.answers = answers
    assert run.running.until_over()[0] == pb.JOB_STATE_DONE
    assert run.cluster.noted == ["died", "start coordinator"]


def test_a_coordinator_whose_disk_has_no_room_is_started_again_however_often(run: Played) -> None:  # P21
    def answers(now_s: float) -> Any:
        if len(run.cluster.noted) > 2 * run.budget:
            return pb.JOB_STATE_DONE
        if run.cluster.running:
            run.cluster.ended = [Ended("coordinator", ExitCode.IO_ERROR, "claims cannot be written (exit code 74)", 1)]
        return Unreachable("no answer")

    run.answers = answers
    assert run.running.until_over()[0] == pb.JOB_STATE_DONE
    assert set(run.cluster.noted) == {"start coordinator"}
    assert run.clock.now_s >= 2 * run.budget * BACKOFF_MAX_S


def test_before_it_has_taken_the_job_it_is_given_up_at_once(run: Played) -> None:
    run.running.accepted = False
    run.cluster.ended = [Ended("coordinator", 2, "there is no such file (exit code 2)", 1)]
    with pytest.raises(ConfigurationError, match=r"no such file$"):
        run.running.until_over()
    assert run.cluster.noted == []


def test_only_an_end_that_ends_the_job_gives_it_its_exit_code(run: Played) -> None:
    states = iter([pb.JOB_STATE_RUNNING, pb.JOB_STATE_FAILED])
    run.answers = lambda now_s: next(states)
    run.cluster.ended = [Ended("worker-0", 2, "cert.pem expired", 1)]
    run.running.until_over()
    assert run.running.failure_code == ExitCode.FAILED, "the job failed later, and not for that"
    run.answers = lambda now_s: pb.JOB_STATE_FAILED
    run.cluster.ended = [Ended("worker-0", 2, "cert.pem expired", 2)]
    run.running.until_over()
    assert run.running.failure_code == ExitCode.CONFIGURATION


@pytest.mark.parametrize("workers", [0, 2])
def test_a_job_without_workers_says_how_one_joins(run: Played, tmp_path: Path, workers: int) -> None:
    said: list[str] = []
    view = SimpleNamespace(say=said.append)
    loaded = load_job(JOB, [("cluster.workers", workers, "--workers")], environ={})
    running = Running(Run(loaded, tmp_path), run.cluster, view)  # type: ignore[arg-type]
    (tmp_path / ADDRESS_FILE).write_text(json.dumps({"pid": PID + 1, "address": "127.0.0.1:1", "run_id": "run-1"}))
    (tmp_path / NEW_JOB_FILE).touch()
    running.start_coordinator()
    hint = f"no workers: the job waits until one joins: parashard worker --connect {tmp_path}"
    assert said == ([] if workers else [hint])


def test_a_script_on_other_addresses_says_what_to_start_elsewhere(
    run: Played, tmp_path: Path, certificates: Certificates
) -> None:
    said: list[str] = []
    sets = [("cluster.workers", 0, ""), ("cluster.host", "train", ""), ("cluster.port", 7100, "")]
    loaded = load_job(JOB, sets, environ={})
    script = ScriptCommand(("python", "train.py", "5"), "/", "train.py 5")
    view = SimpleNamespace(say=said.append)
    running = Running(
        Run(loaded, tmp_path, credentials=certificates.of(Role.OPERATOR), script=script), run.cluster, view
    )  # type: ignore[arg-type]
    (tmp_path / ADDRESS_FILE).write_text(json.dumps({"pid": PID + 1, "address": "train:7100", "run_id": "run-1"}))
    (tmp_path / NEW_JOB_FILE).touch()
    running.start_coordinator()
    command = "parashard worker --connect train:7100 --tls-dir DIR train.py 5"
    assert said == [f"no workers: the job waits until one joins: {command}"]


def test_a_process_whose_machine_will_go_is_asked_to_end_once_and_killed_when_its_time_is_over(run: Played) -> None:
    run.cluster.running.append("worker-1")
    run.cluster.coming = {"worker-1": 9.0}

    def answers(now_s: float) -> Any:
        if "kill worker-1" in run.cluster.noted:
            assert now_s >= 9.0
            return pb.JOB_STATE_DONE
        return pb.JOB_STATE_RUNNING

    run.answers = answers
    run.running.until_over()
    assert run.cluster.noted == ["ask worker-1", "kill worker-1"]


def test_processes_elsewhere_get_the_address_of_a_coordinator_that_keeps_its_port(run: Played, tmp_path: Path) -> None:
    elsewhere, due = FakeCluster("10.0.0.1"), [pb.ProcessName(role="worker", index=0)]
    running = Running(Run(load_job(JOB, environ={}), tmp_path), run.cluster, JobView(), starter=elsewhere)  # type: ignore[arg-type]
    (tmp_path / ADDRESS_FILE).write_text(json.dumps({"pid": PID + 1, "address": "10.0.0.1:71", "run_id": "run-1"}))
    (tmp_path / NEW_JOB_FILE).touch()
    running.start_coordinator()
    assert run.cluster.words["coordinator"][:2] == ["--host", "10.0.0.1"]
    run.cluster.ended = [Ended("coordinator", -9, "killed by SIGKILL", 1)]

    def supervise(request: pb.SuperviseRequest, deadline_s: float) -> pb.SuperviseReply:
        if due:
            return pb.SuperviseReply(state=pb.JOB_STATE_RUNNING, start=[due.pop()])
        over = run.cluster.noted.count("start coordinator") == 2
        return pb.SuperviseReply(state=pb.JOB_STATE_DONE if over else pb.JOB_STATE_RUNNING)

    running._client = SimpleNamespace(supervise=supervise, get_status=run.get_status)  # type: ignore[assignment]
    running.until_over()
    again = run.cluster.words["coordinator"]
    assert again[again.index("--port") + 1] == "71"
    words = elsewhere.words["worker-0"]
    assert words[words.index("--connect") + 1] == "10.0.0.1:71"
    assert "worker-0" not in run.cluster.words
