"""What every starter of processes promises (`parashard.launch.starting.Starter`): one suite for all of them.

A subclass has a fixture `starter`, a source `STARTER` that makes one in another process, and fixtures for what its
machines may do. Its processes run `starter_child`, which they find by the `PYTHONPATH` that `CHILDREN` is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.launch.starting import Ended, Starter
from parashard.process.addresses import interfaces, is_loopback
from parashard.process.shell import ExitCode
from support.waiting import DEADLINE_S, eventually

CHILDREN = Path(__file__).parent
MODULE = "starter_child"
GOES_S = 120.0
"""A machine that goes soon is gone before."""

PROGRAM = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1])
{starter}
starter.start("worker-0", "starter_child", ["wait", str(folder / "up")])
while True:
    starter.reap()
    time.sleep(0.02)
"""


def pid_in(file: Path) -> int:
    """Wait until a child has written its process id, and return that."""
    return int(eventually(lambda: file.exists() and file.read_text(), f"a child writes {file.name}"))


def is_gone(pid: int) -> bool:
    """Tell whether a process is no more; a zombie is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def reaped(starter: Starter, count: int = 1) -> list[Ended]:
    """Wait for so many ends."""
    found: list[Ended] = []

    def all_() -> bool:
        found.extend(starter.reap())
        return len(found) >= count

    eventually(all_, f"{count} processes end")
    return found


class StarterConformance:
    """The promises, as tests."""

    STARTER: str
    """Python that makes `starter`, given `folder`, a new folder of the test's."""

    @pytest.fixture
    def machine_goes(self) -> Callable[[], None] | None:
        """Return what tells the machine of all processes that it will go soon; None: nothing can."""
        return None

    @pytest.fixture
    def machine_dies(self) -> Callable[[], None] | None:
        """Return what takes the machine of all processes away at once; None: it is the starter's own."""
        return None

    def test_the_coordinator_is_found_at_an_address_of_this_machine_or_by_the_runs_folder(
        self, starter: Starter
    ) -> None:
        assert is_loopback(starter.launcher_address) or starter.launcher_address in {
            "",
            *(one.address for one in interfaces()),
        }

    def test_a_process_that_ends_is_reaped_once_with_its_exit_code_and_last_line(self, starter: Starter) -> None:
        starter.start("shard-0", MODULE, ["exit", "3", "the file is torn"])
        assert starter.running == ["shard-0"]
        assert reaped(starter) == [Ended("shard-0", 3, "the file is torn (exit code 3)", 1)]
        assert (starter.reap(), starter.running) == ([], [])

    def test_a_name_that_ended_may_be_started_again_and_has_its_own_last_line(self, starter: Starter) -> None:
        for number, said in enumerate(("first", "second"), 1):
            starter.start("worker-0", MODULE, ["exit", "1", said])
            assert reaped(starter) == [Ended("worker-0", 1, f"{said} (exit code 1)", number)]

    def test_a_name_that_runs_is_not_started_again(self, starter: Starter, tmp_path: Path) -> None:
        starter.start("worker-0", MODULE, ["wait", str(tmp_path / "up")])
        with pytest.raises(AssertionError, match="worker-0 runs already"):
            starter.start("worker-0", MODULE, ["exit", "0"])

    def test_ends_are_numbered_over_all_processes(self, starter: Starter) -> None:
        for name in ("worker-0", "shard-1", "worker-2"):
            starter.start(name, MODULE, ["exit", "0"])
        assert sorted(ended.number for ended in reaped(starter, 3)) == [1, 2, 3]

    def test_a_process_that_is_asked_to_end_may_save_first(self, starter: Starter, tmp_path: Path) -> None:
        starter.start("shard-0", MODULE, ["save", str(tmp_path / "up"), str(tmp_path / "saved"), "shard-0"])
        pid_in(tmp_path / "up")
        starter.ask_to_end("shard-0")
        assert reaped(starter) == [Ended("shard-0", 0, "exit code 0", 1)]
        assert (tmp_path / "saved").read_text() == "shard-0 "

    def test_a_process_is_killed_whatever_it_does_with_signals(self, starter: Starter, tmp_path: Path) -> None:
        starter.start("worker-0", MODULE, ["deaf", str(tmp_path / "up")])
        pid_in(tmp_path / "up")
        starter.ask_to_end("worker-0")
        pid_in(tmp_path / "up.asked")
        assert starter.reap() == []
        starter.kill("worker-0")
        assert reaped(starter) == [Ended("worker-0", -signal.SIGKILL, "killed by SIGKILL", 1)]

    def test_a_name_that_does_not_run_may_be_asked_and_killed(self, starter: Starter) -> None:
        starter.ask_to_end("worker-7")
        starter.kill("worker-7")
        assert starter.reap() == []

    def test_reaping_does_not_wait(self, starter: Starter, tmp_path: Path) -> None:
        starter.start("worker-0", MODULE, ["wait", str(tmp_path / "up")])
        pid_in(tmp_path / "up")
        started_s = time.monotonic()
        assert starter.reap() == []
        assert time.monotonic() - started_s < 1.0
        assert starter.coming_ends() == {}

    def test_what_cannot_be_started_ends_by_itself(self, starter: Starter) -> None:
        starter.start("worker-0", "no_such_module", [])
        (ended,) = reaped(starter)
        assert ended.exit_code == ExitCode.FAILED
        assert "no_such_module" in ended.reason

    def test_end_ends_workers_first_and_leaves_none(self, starter: Starter, tmp_path: Path) -> None:
        pids = []
        for name in ("shard-0", "worker-0", "shard-1"):
            starter.start(name, MODULE, ["save", str(tmp_path / name), str(tmp_path / "saved"), name])
            pids.append(pid_in(tmp_path / name))
        starter.end(grace_s=DEADLINE_S)
        ended = (tmp_path / "saved").read_text().split()
        assert (ended[0], sorted(ended)) == ("worker-0", ["shard-0", "shard-1", "worker-0"])
        assert (starter.running, [pid for pid in pids if not is_gone(pid)]) == ([], [])

    def test_end_kills_what_does_not_listen(self, starter: Starter, tmp_path: Path) -> None:
        starter.start("shard-0", MODULE, ["deaf", str(tmp_path / "up")])
        pid = pid_in(tmp_path / "up")
        starter.end(grace_s=0.05)
        eventually(lambda: is_gone(pid), "it is killed")

    def test_no_process_outlives_a_starter_that_is_killed(self, starter: Starter, tmp_path: Path) -> None:
        starter.end()  # the one of this test is another
        program = PROGRAM.format(starter=self.STARTER)
        own = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=os.environ)
        try:
            pid = pid_in(tmp_path / "up")
        finally:
            own.kill()
            own.wait()
        eventually(lambda: is_gone(pid), "the process ends with its starter")

    def test_the_end_of_a_machine_is_told_before_it_comes(
        self, starter: Starter, tmp_path: Path, machine_goes: Callable[[], None] | None
    ) -> None:
        starter.start("shard-0", MODULE, ["wait", str(tmp_path / "up")])
        pid_in(tmp_path / "up")
        if machine_goes is None:
            assert starter.coming_ends() == {}
            return
        begun_s = time.monotonic()
        machine_goes()
        eventually(lambda: (starter.reap(), starter.coming_ends())[1], "the end is told")
        ((name, deadline_s),) = starter.coming_ends().items()
        assert name == "shard-0"
        assert begun_s < deadline_s < time.monotonic() + GOES_S

    def test_the_processes_of_a_machine_that_dies_are_ended(
        self, starter: Starter, tmp_path: Path, machine_dies: Callable[[], None] | None
    ) -> None:
        if machine_dies is None:
            pytest.skip("the machine of the processes is the starter's own: both end together")
        starter.start("shard-0", MODULE, ["wait", str(tmp_path / "up")])
        pid = pid_in(tmp_path / "up")
        machine_dies()
        (ended,) = reaped(starter)
        assert (ended.name, starter.running) == ("shard-0", [])
        assert ended.exit_code != ExitCode.CONFIGURATION, "it is started again"
        eventually(lambda: is_gone(pid), "it ends with its machine's link")
