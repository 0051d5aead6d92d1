"""Standard streams that are closed, or whose disk is full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import DEADLINE_S

DYING_THREAD = """
import threading
from parashard.process import shell
def serve(stop):
    threading.Thread(target=lambda: 1 / 0).start()
    stop.wait(60)
    return shell.ExitCode.DONE
"""
BUG = """
from parashard.process import shell
def serve(stop):
    raise ZeroDivisionError
"""
ERROR_OF_OURS = """
from parashard import errors
from parashard.process import shell
def serve(stop):
    raise errors.BadData('x.npz is torn')
"""
LOGS = """
from parashard.process.logs import log
from parashard.process import shell
def serve(stop):
    for _ in range(1000):
        log.warning('checkpoint-dropped', error='x' * 100)
    print('said')
    return shell.ExitCode.DONE
"""
END = "shell.end_process(shell.run_service('shard-0', None, serve))"


@pytest.mark.parametrize(
    ("serve", "code"),
    [(DYING_THREAD, 1), (BUG, 1), (ERROR_OF_OURS, 2), (LOGS, 0)],
    ids=["a thread dies", "a bug", "an error of ours", "log lines"],
)
def test_a_process_ends_with_its_own_exit_code(serve: str, code: int) -> None:  # P21
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", serve + END], stdout=full, stderr=full, timeout=DEADLINE_S, check=False
        )
    assert ended.returncode == code


PROGRAM = """
import os
os.closerange(0, 3)
import parashard
assert os.open(os.devnull, os.O_RDONLY) > 2
assert all(os.get_inheritable(number) for number in range(3))
"""


def test_what_is_opened_later_gets_no_number_of_theirs() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False, timeout=60).returncode == 0
