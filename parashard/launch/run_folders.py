"""Run directories: which one a run gets, which one is meant, who works in it, and what lies there for others.

Knows files and their names (`parashard.launch.run_files`), and of processes only which one holds a lock. Called by
`parashard.launch.run`, by the run in progress, by workers and by the command line.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parashard.errors import ConfigurationError
from parashard.job.layers import Override
from parashard.launch.run_files import JOB_FILE, ORIGIN_FILE, REPORT_FILE
from parashard.protocol.coordinator_client import ADDRESS_FILE
from parashard.store.durable import write_durably

if TYPE_CHECKING:
    from parashard.job.load import LoadedJob

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


def discard_unbegun(run_dir: Path, *, keep: bool) -> None:
    """Remove a new run's directory if its job was never taken, and so nothing is in it but logs of the refusal.

    Parameters
    ----------
    run_dir : Path
    keep : bool
        True: it was there before, and empty; it stays so.
    """
    if (run_dir / JOB_FILE).exists() or launcher_of(run_dir) is not None:  # another one began meanwhile
        return
    shutil.rmtree(run_dir, ignore_errors=True)  # what cannot be removed is in nobody's way: every run has a new one
    if keep:
        run_dir.mkdir(exist_ok=True)


def place_of(text: str | None) -> str:
    """Return the place that a user means: a run's directory for its name under `runs/`, for None the newest run's.

    An address, a URL and any other path stay as they are: who is given the place says what may be there.
    """
    if text is None:
        return str(newest_run())
    return str(_run_at(text) or text)


def run_named(text: str) -> Path:
    """Return the run directory that a user means: a path, or a name under `runs/`.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    path = _run_at(text)
    if path is None:
        raise ConfigurationError(f"{text!r} is no run; allowed: a run directory, or one's name under {RUNS}/")
    return path.absolute()


def _run_at(text: str) -> Path | None:
    for path in (Path(text), RUNS / text):
        if (path / JOB_FILE).is_file() or (path / ADDRESS_FILE).is_file():
            return path
    return None


def runs_here() -> list[Path]:
    """Return the run directories under `runs/`, the newest last."""
    found = [path.parent for path in RUNS.glob(f"*/{JOB_FILE}")]
    return sorted(found, key=lambda run: os.path.getmtime(run / JOB_FILE))


def unfinished_run(asked: str | None) -> Path:
    """Return the run to go on with: the one that was asked for, or the newest under `runs/` that is not done.

    Raises
    ------
    ConfigurationError
        If there is none, or the one that was asked for is done.
    """
    if asked is not None:
        run_dir = run_named(asked)
        if is_done(run_dir):
            raise ConfigurationError(
                f"{asked} is done: {read_report(run_dir)['reason']}; there is nothing to go on with"
            )
        return run_dir
    unfinished = [run for run in runs_here() if not is_done(run)]
    if not unfinished:
        raise ConfigurationError(f"no unfinished run under {RUNS}/; say which run: its directory")
    return unfinished[-1].absolute()


def is_done(run_dir: Path) -> bool:
    """Tell whether a run has come to its end."""
    return read_report(run_dir).get("state") == "done"


def resumed_job(run_dir: Path, overrides: Sequence[Override]) -> LoadedJob:
    """Return the job of a run that goes on: its own file, with the flags of this time over it.

    The environment was applied when the run began. Models are looked up where they were then.
    """
    from parashard.job.load import load_job

    loaded = load_job(run_dir / JOB_FILE, overrides, environ={})
    with suppress(OSError, ValueError, KeyError, TypeError):  # a run from before there was such a file
        return replace(loaded, path=Path(json.loads((run_dir / ORIGIN_FILE).read_text())["job_file"]))
    return loaded


def keep_origin(run_dir: Path, loaded: LoadedJob) -> None:
    """Write down which file a job came from, for `resumed_job`, and when the run began, which stays."""
    began_at = run_began_at(run_dir) or time.time()
    (run_dir / ORIGIN_FILE).write_text(json.dumps({"job_file": str(loaded.path), "began_at": began_at}))


def run_began_at(run_dir: Path) -> float:
    """Return when a run was started first, in seconds since 1970; 0 where there is none yet.

    A run that nobody wrote that down of began with its job file, which is written again when it is resumed.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(json.loads((run_dir / ORIGIN_FILE).read_text())["began_at"])
    with suppress(OSError):
        return os.path.getmtime(run_dir / JOB_FILE)
    return 0.0


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


def launcher_lock(run_dir: Path) -> int:
    """Lock a run directory as `locked` does, and write down that this process is the launcher.

    Raises
    ------
    ConfigurationError
        If another one has it.
    OSError
        If nothing can be written there.
    """
    descriptor = locked(run_dir)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def launcher_of(run_dir: Path) -> int | None:
    """Return the process id of the `parashard run` that works in a directory; None: nobody does on this machine.

    Asks without taking the lock, which would keep a launcher out that starts just then.
    """
    try:
        pid, lock = int((run_dir / LOCK_FILE).read_text()), os.stat(run_dir / LOCK_FILE)
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.path.samestat(os.stat(descriptor), lock):
                    return pid
    except (OSError, ValueError):
        pass  # it is gone, or another's
    return None


def how_it_ended(run_dir: Path) -> tuple[str, str] | None:
    """Return state and reason of a run that is over, None for one that may be in progress.

    A launcher of ours that is alive may still have work to do; without one, a run that failed may be taken up again.
    """
    report = read_report(run_dir)
    local = (run_dir / LOCK_FILE).exists()
    if (
        report.get("state") not in (("done", "failed", "stopped") if local else ("done",))
        or launcher_of(run_dir) is not None
    ):
        return None
    return str(report["state"]), str(report.get("reason", ""))


def read_report(run_dir: Path) -> dict[str, Any]:
    """Return the report in a run directory, or an empty one if it has none yet."""
    try:
        report: dict[str, Any] = json.loads((run_dir / REPORT_FILE).read_text())
    except (OSError, ValueError):  # there is none, or none that was written whole
        return {}
    return report


def write_report(run_dir: Path, report: Mapping[str, Any]) -> None:
    """Write a run's report, whole or not at all; durable when this returns. OSError leaves what was there."""
    write_durably(run_dir / REPORT_FILE, (json.dumps(report, indent=2) + "\n").encode())


def coordinator_in(run_dir: Path) -> dict[str, Any]:
    """Return what the coordinator wrote about itself in a run directory; empty if it has not yet."""
    try:
        where: dict[str, Any] = json.loads((run_dir / ADDRESS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return where


def _job_name_in(run_dir: Path) -> str:
    """Return the name of the job in a run directory; "" if its file is not one that this version can read."""
    from parashard.job.load import load_job

    try:
        return load_job(run_dir / JOB_FILE, environ={}).job.job.name
    except ConfigurationError:
        return ""


def check_in_progress(where: str) -> None:
    """Refuse the directory of a run that is over, which no coordinator will answer for.

    Raises
    ------
    ConfigurationError
    """
    ended = how_it_ended(Path(where))
    if ended is not None:
        raise ConfigurationError(f"{where} is over ({ended[0]}: {ended[1]}): there is nobody to ask")
