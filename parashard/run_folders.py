"""Run directories: which one a run gets, which one is meant, who works in it, and what lies there for others.

Knows files and their names (`parashard.run_files`), and no process. Called by `parashard.run`, by the run in progress
and by the command line.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from datetime import datetime
from pathlib import Path
from typing import Any

from parashard.coordinator_client import ADDRESS_FILE
from parashard.errors import ConfigurationError
from parashard.job.load import load_job
from parashard.run_files import JOB_FILE, REPORT_FILE

LOCK_FILE = "lock"
RUNS = Path("runs")


def new_run_dir(asked: Path | None, name: str) -> Path:
    """Create and return a run's own directory.

    Raises
    ------
    ConfigurationError
        If the directory that was asked for has something in it (P2), or cannot be made.
    """
    path = asked or RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigurationError(f"run directory {path} is not empty; every run has a directory of its own")
    except OSError as error:
        raise ConfigurationError(f"run directory {path}: {error.strerror}") from None
    return path.absolute()


def resumed_run_dir(asked: Path | None, name: str) -> Path:
    """Return the directory of a run that was stopped: the one that was asked for, or the job's newest under `runs/`.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    found = [asked] if asked is not None else sorted(RUNS.glob(f"{name}-*"), key=os.path.getmtime)
    kept = [path for path in found if (path / JOB_FILE).is_file()]
    if asked is None:
        kept = [path for path in kept if _job_name_in(path) == name]
    if not kept:
        raise ConfigurationError(
            f"--resume: {asked or f'no directory of a run of {name!r} under {RUNS}/'} has no {JOB_FILE} of a run"
        )
    return kept[-1].absolute()


def newest_run() -> Path:
    """Return the newest run directory under `runs/`.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    runs = [path.parent for path in RUNS.glob(f"*/{ADDRESS_FILE}")]
    if not runs:
        raise ConfigurationError("no run directory under runs/; say which coordinator: host:port or a run directory")
    return max(runs, key=lambda run: os.path.getmtime(run / ADDRESS_FILE))


def locked(run_dir: Path) -> int:
    """Return the descriptor of a run directory's lock, held until it is closed: one launcher at a time.

    Raises
    ------
    ConfigurationError
        If another one has it.
    """
    descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigurationError(f"run directory {run_dir}: another `parashard run` works in it") from None
    return descriptor


def read_report(run_dir: Path) -> dict[str, Any]:
    """Return the report in a run directory, or an empty one if it has none yet."""
    try:
        report: dict[str, Any] = json.loads((run_dir / REPORT_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return report


def coordinator_in(run_dir: Path) -> dict[str, Any]:
    """Return what the coordinator wrote about itself in a run directory; empty if it has not yet."""
    try:
        where: dict[str, Any] = json.loads((run_dir / ADDRESS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return where


def _job_name_in(run_dir: Path) -> str:
    """Return the name of the job in a run directory; "" if its file is not one that this version can read."""
    try:
        return load_job(run_dir / JOB_FILE, environ={}).job.job.name
    except ConfigurationError:
        return ""
