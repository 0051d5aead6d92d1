"""The processes of a run are the children of its launcher, by the names that they were started with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parashard.errors import ConfigurationError
from parashard.launch.programs import name_in, processes_of, send
from parashard.launch.run_folders import launcher_lock

WAITING = "import signal; print('up', flush=True); signal.pause()"


class Children:
    """Children with the command lines of services, each of which waits for a signal."""

    def __init__(self) -> None:
        self.by_name: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str) -> int:
        child = subprocess.Popen([sys.executable, "-c", WAITING, *words], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        self.by_name[name] = child
        return child.pid


@pytest.fixture
def children() -> Iterator[Children]:
    """Return a way to start children; they end with the test."""
    children = Children()
    yield children
    for child in children.by_name.values():
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("python -P -m parashard_coordinator --run-dir runs/x", "coordinator"),
        ("python -P -m parashard_server --connect runs/x --index 3 --lifeline 5", "shard-3"),
        ("python -P -m parashard_worker --connect runs/x --name worker-12", "worker-12"),
        ("python -P -m parashard_worker --connect runs/x", ""),
        ("python -P -m", ""),
        ("python -m parashard run", ""),
        ("bash", ""),
    ],
)
def test_a_command_line_has_the_process_s_name(line: str, name: str) -> None:
    assert name_in(line.split()) == name


def test_one_process_of_a_run_is_struck_and_no_other(tmp_path: Path, children: Children) -> None:
    lock = launcher_lock(tmp_path)  # this process is the launcher
    wanted = {
        "coordinator": children.start("coordinator", "-m", "parashard_coordinator"),
        "shard-1": children.start("shard-1", "-m", "parashard_server", "--index", "1"),
        "worker-0": children.start("worker-0", "-m", "parashard_worker", "--name", "worker-0"),
    }
    children.start("foreign", "-m", "tail")
    assert processes_of(tmp_path) == wanted
    assert send(tmp_path, "shard-1", signal.SIGKILL) == wanted["shard-1"]
    assert children.by_name["shard-1"].wait() == -signal.SIGKILL
    assert [children.by_name[name].poll() for name in ("coordinator", "worker-0")] == [None, None]
    with pytest.raises(ConfigurationError, match="has no process 'shard-1' now; it has coordinator, worker-0"):
        send(tmp_path, "shard-1", signal.SIGKILL)
    os.close(lock)


def test_a_process_that_hangs_goes_on(tmp_path: Path, children: Children) -> None:
    lock = launcher_lock(tmp_path)
    pid = children.start("worker-0", "-m", "parashard_worker", "--name", "worker-0")
    send(tmp_path, "worker-0", signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    send(tmp_path, "worker-0", signal.SIGCONT)
    assert os.WIFCONTINUED(os.waitpid(pid, os.WCONTINUED)[1])
    os.close(lock)


def test_a_run_without_a_launcher_has_no_processes(tmp_path: Path, children: Children) -> None:
    children.start("worker-0", "-m", "parashard_worker", "--name", "worker-0")
    with pytest.raises(ConfigurationError, match="is not in progress on this machine"):
        send(tmp_path, "worker-0", signal.SIGKILL)
