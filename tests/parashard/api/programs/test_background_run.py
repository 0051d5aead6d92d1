"""A run beside its program: what a timeout leaves of it, and that it is stopped when the program or the `with` ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parashard.api.programs import background
from parashard.api.programs.background import BackgroundRun, within
from parashard.data.base import DataSpec
from parashard.display.live import JobView
from parashard.errors import ConfigurationError, JobFailed
from parashard.launch.programs import Program
from parashard.launch.run import INTERRUPTED, Outcome
from parashard.launch.run_control import RunControl
from parashard.launch.runs import Run
from parashard.models.declaration import declare
from parashard.process.shell import ExitCode
from support.waiting import DEADLINE_S


class AtExit:
    """Keeps what is to be called when the program ends."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def register(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def unregister(self, call: Callable[[], None]) -> None:
        self.calls = [other for other in self.calls if other != call]


class Job:
    """A job that goes on until it is released or stopped."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.stopped = False

    def run(self, run: Run, view: JobView, *, control: RunControl) -> Outcome:
        control.tell(accepted=True)
        try:
            while not self.released.is_set():
                control.pause(DEADLINE_S)
        except KeyboardInterrupt:
            self.stopped = True
            return Outcome(INTERRUPTED, {}, "interrupted", run.folder)
        return Outcome(ExitCode.DONE, {"steps_total": 3}, "", run.folder)


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> AtExit:
    made = AtExit()
    monkeypatch.setattr(background, "atexit", made)
    return made


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job()
    monkeypatch.setattr(background, "run_job", made.run)
    return made


@pytest.fixture
def run(tmp_path: Path, at_exit: AtExit, job: Job) -> Iterator[BackgroundRun]:
    loaded: Any = SimpleNamespace(job=SimpleNamespace(cluster=SimpleNamespace(start_s=DEADLINE_S)))
    declared = declare(DataSpec(3, 0, (), 0, "of a test"), {"w": np.zeros(2)})
    made = BackgroundRun(Run(loaded, tmp_path, declared), RunControl(), Program("ps.Cluster"))
    made.start()
    yield made
    made.stop()


def test_a_wait_for_the_end_is_spoken_of_after_a_while(
    run: BackgroundRun, job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(background, "QUIET_S", 0.001)
    with pytest.raises(TimeoutError):
        run.finish(0.01, "sessions compute them")
    assert capsys.readouterr().err.count("0 steps of ") == 1
    with pytest.raises(TimeoutError):
        run.finish(0.01)
    assert capsys.readouterr().err == "", "where it is not known what it waits for"
    job.released.set()
    run._control.close()  # wakes the job
    run.finish(DEADLINE_S, "sessions compute them")


def test_a_run_that_is_not_done_in_time_goes_on_and_is_stopped_at_the_programs_end(
    run: BackgroundRun, at_exit: AtExit, job: Job
) -> None:
    with pytest.raises(TimeoutError, match=r"^after 0.01 s the job is not done; it goes on until the program ends"):
        run.finish(0.01)
    assert not job.stopped
    assert at_exit.calls == [run.stop]
    at_exit.calls[0]()
    assert job.stopped


def test_a_run_that_is_waited_for_again_is_done(run: BackgroundRun, at_exit: AtExit, job: Job) -> None:
    with pytest.raises(TimeoutError):
        run.finish(0.0)
    job.released.set()
    run._control.close()
    assert run.finish(DEADLINE_S) == {"steps_total": 3}
    assert at_exit.calls == []


def test_the_end_of_a_with_stops_a_run_that_is_not_done_in_time(run: BackgroundRun, job: Job) -> None:
    with pytest.raises(TimeoutError, match=r"^after 0 s the job is not done; the end of the `with` has stopped it"):
        within(run, lambda: run.finish(0), None)
    assert job.stopped


def test_ctrl_c_at_the_end_of_a_with_stops_the_run(run: BackgroundRun, job: Job) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        within(run, interrupted, None)
    assert job.stopped


def test_an_error_in_a_with_stops_the_run(run: BackgroundRun, job: Job) -> None:
    within(run, lambda: run.finish(DEADLINE_S), ValueError())
    assert job.stopped
    with pytest.raises(JobFailed, match="interrupted"):
        run.finish(DEADLINE_S)


@pytest.mark.parametrize("timeout_s", ["3", None, True, float("nan"), float("inf")])
def test_a_timeout_is_a_number_of_seconds(run: BackgroundRun, timeout_s: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"timeout_s must be a number of seconds of at most 1e\+09, found "):
        run.finish(timeout_s)
