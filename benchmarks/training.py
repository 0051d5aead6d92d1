"""A training run as a user starts it, `parashard run` or `parashard chaos` in a process of its own, and its report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def trained(
    command: str, job: Path, settings: Sequence[str], options: Sequence[str] = (), scratch: Path | None = None
) -> dict[str, Any]:
    """Run a job in a folder that is removed after it, and return its report.

    Parameters
    ----------
    command : str
        "run" or "chaos".
    job : Path
        The job file.
    settings : sequence of str
        KEY=VALUE, as `--set` takes them.
    options : sequence of str
        Further words of the command line.
    scratch : Path, optional
        Parent of the folder; None: the system's temporary folder.

    Raises
    ------
    CalledProcessError
        If the run did not end well; the reason is on standard error.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        words = [sys.executable, "-m", "parashard", command, str(job), "--json", "--run-dir", f"{folder}/run"]
        words += [word for setting in settings for word in ("--set", setting)]
        done = subprocess.run([*words, *options], stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def clean_up_when_ended() -> None:
    """Have SIGTERM and SIGHUP end this process as Ctrl-C does: runs are ended, and their folders removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
