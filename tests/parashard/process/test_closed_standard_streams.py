"""Standard streams that are closed, as under cron: a file, a pipe or a lock would get their numbers."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
os.closerange(0, 3)
import parashard
assert os.open(os.devnull, os.O_RDONLY) > 2
assert all(os.get_inheritable(number) for number in range(3))
"""


def test_what_is_opened_later_gets_no_number_of_theirs() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False, timeout=60).returncode == 0
