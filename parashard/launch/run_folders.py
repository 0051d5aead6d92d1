"""Run directories: their creation, lookup, locks and files."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from parashard.errors import ConfigurationError, StoreFailed
from parashard.job.keys import check_path
from parashard.job.layers import Override
from parashard.job.load import LoadedJob, job_of_run
from parashard.process.best_effort import why_failed
from parashard.process.durable import disk_failed, write_durably
from parashard.process.run_files import CHECKPOINTS, JOB_FILE, ORIGIN_FILE, REPORT_FILE
from parashard.protocol.coordinator_client import ADDRESS_FILE, find_coordinator

LOCK_FILE = "lock"
BEGUN = (ORIGIN_FILE, ADDRESS_FILE, CHECKPOINTS)  # any of them: early versions recorded no origin
RUNS_VARIABLE = "PARASHARD_RUNS"
RUNS = Path(os.environ.get(RUNS_VARIABLE) or "runs")
"""Folder of runs without an explicit directory: `runs` in the working directory, unless the variable names another."""


def new_run_dir(asked: Path | None, name: str) -> Path:
    """Create and return a run's folder; ConfigurationError if not empty, not UTF-8, or it cannot be created."""
    check_path((asked or RUNS).absolute(), "run directory")
    path = asked or RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{os.urandom(4).hex()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigurationError(f"run directory {path} is not empty; every run has a directory of its own")
    except OSError as error:
        raise ConfigurationError(f"run directory {path}: {error.strerror}") from None
    return path.absolute()


def resumed_run_dir(asked: Path | None, name: str) -> Path:
    """Return the directory of a stopped run, asked for or the job's newest; ConfigurationError if there is none."""
    kept = runs_of(name) if asked is None else [asked] if _began_in(asked) else []
    if not kept:
        raise ConfigurationError(
            f"--resume: {asked or f'no directory of a run of {name!r} under {RUNS}/'} has no {JOB_FILE} of a run"
        )
    return kept[-1].absolute()


def runs_of(name: str) -> list[Path]:
    """Return the directories of the runs of a job of this name under `runs/`, in the order they began."""
    return [path.absolute() for path in runs_here() if path.name.startswith(f"{name}-") and job_name_in(path) == name]


def discard_unbegun(run_dir: Path, *, keep: bool) -> None:
    """Remove a new run's directory if its job was never accepted; with `keep` only empty it, as it was before."""
    if (run_dir / JOB_FILE).exists() or launcher_of(run_dir) is not None:  # another one began meanwhile
        return
    shutil.rmtree(run_dir, ignore_errors=True)  # a remainder does not matter: every run has a new directory
    if keep:
        run_dir.mkdir(exist_ok=True)


def place_of(text: str | None) -> str:
    """Resolve a user's reference to a run: a name under `runs/` to its directory, None to the newest run's."""
    # An address, a URL and any other path are returned unchanged, for the caller to check.
    if text is None:
        return str(newest_run())
    return str(_run_at(text) or text)


def run_named(text: str) -> Path:
    """Resolve a run directory: a path, or a name under `runs/`; raise ConfigurationError if there is none."""
    path = _run_at(text)
    if path is None:
        raise ConfigurationError(f"{text!r} is no run; allowed: a run directory, or one's name under {RUNS}/")
    return path.absolute()


def coordinator_at(place: str) -> str:
    """Return the address of a coordinator that runs, given as host:port or as a run directory."""
    folder = Path(place)
    if folder.is_dir() and not any((folder / name).is_file() for name in (ADDRESS_FILE, ORIGIN_FILE)):
        raise ConfigurationError(
            f"there is no run in the folder {place}: it has no {ADDRESS_FILE}, and a {JOB_FILE} alone is no run"
        )
    return find_coordinator(place, wait_s=0.0)


def _run_at(text: str) -> Path | None:
    for path in (Path(text), RUNS / text):
        if (path / JOB_FILE).is_file() or (path / ADDRESS_FILE).is_file():
            return path
    return None


def _began_in(folder: Path) -> bool:
    """Tell whether a run began in a folder: a job file alone may be the user's."""
    return (folder / JOB_FILE).is_file() and any((folder / name).exists() for name in BEGUN)


def runs_here() -> list[Path]:
    """Return the runs under `runs/` in the order they began, not by files' times, which editors change."""
    return sorted((path.parent for path in RUNS.glob(f"*/{JOB_FILE}")), key=run_began_at)


def unfinished_run(asked: str | None) -> Path:
    """Return the run to resume, asked for or the newest that is not done; ConfigurationError if there is none."""
    if asked is not None:
        run_dir = run_named(asked)
        if not _began_in(run_dir):
            raise ConfigurationError(f"{asked}: no run began in this folder; its {JOB_FILE} alone is none")
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
    """Return whether a run is done."""
    return read_report(run_dir).get("state") == "done"


def as_begun(loaded: LoadedJob, run_dir: Path) -> LoadedJob:
    """Return a job with the policy that its resumed run has chosen, if the job leaves that open."""
    file = run_dir / JOB_FILE
    return loaded.as_begun(job_of_run(file).job) if file.exists() else loaded


def resumed_job(run_dir: Path, overrides: Sequence[Override]) -> LoadedJob:
    """Return the job of a resumed run, overridden by the present flags; the environment was applied when it began."""
    loaded = as_begun(job_of_run(run_dir / JOB_FILE, overrides), run_dir)
    file = read_record(run_dir / ORIGIN_FILE).get("job_file")
    return loaded._replace(path=Path(file)) if isinstance(file, str) else loaded  # an older version wrote none


def keep_origin(run_dir: Path, loaded: LoadedJob) -> None:
    """Record the path of the job's original file, for `resumed_job`, and when the run first began."""
    began_at = run_began_at(run_dir) or time.time()
    write_durably(run_dir / ORIGIN_FILE, json.dumps({"job_file": str(loaded.path), "began_at": began_at}).encode())


def run_began_at(run_dir: Path) -> float:
    """Return when a run was first started, in seconds since 1970 (without a record, its job file's time); 0: never."""
    began_at = read_record(run_dir / ORIGIN_FILE).get("began_at")
    if isinstance(began_at, int | float):
        return float(began_at)
    with suppress(OSError):
        return os.path.getmtime(run_dir / JOB_FILE)
    return 0.0


def newest_run() -> Path:
    """Return the newest run directory under `runs/`; raise ConfigurationError if there is none."""
    runs = [path.parent for path in RUNS.glob(f"*/{ADDRESS_FILE}")]
    if not runs:
        raise ConfigurationError("no run directory under runs/; say which coordinator: host:port or a run directory")
    return max(runs, key=lambda run: os.path.getmtime(run / ADDRESS_FILE))


def locked(run_dir: Path) -> int:
    """Lock a run directory, until the returned descriptor is closed; ConfigurationError if another process has it."""
    descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigurationError(
            f"run directory {run_dir}: another `parashard run` works in it, or a script; wait for its end, or stop it"
        ) from None
    return descriptor


def launcher_lock(run_dir: Path) -> int:
    """Lock a run directory as `locked` does, and record this process as the launcher."""
    descriptor = locked(run_dir)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


@contextmanager
def errors_of(run_dir: Path) -> Iterator[None]:
    """Raise an OSError of the block as ConfigurationError, or StoreFailed where the disk fails at present."""
    try:
        yield
    except OSError as error:
        if disk_failed(error):
            raise StoreFailed(f"run directory {run_dir}: {why_failed(error)}; make room and start it again") from error
        raise ConfigurationError(f"run directory {run_dir}: {error.strerror}") from None


@contextmanager
def locked_run(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory in the block, as its launcher: no other process writes into it."""
    # Raises ConfigurationError if another process holds it.
    with errors_of(run_dir):
        lock = launcher_lock(run_dir)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def unchanged_if_refused(run_dir: Path, names: Sequence[str]) -> Iterator[None]:
    """Restore files of a run directory if the block raises ConfigurationError; it may replace, not rewrite them."""
    kept = {name: run_dir / f"{name}.kept" for name in names}
    for name, link in kept.items():
        link.unlink(missing_ok=True)  # left by a process that was killed in the block
        with suppress(FileNotFoundError):
            os.link(run_dir / name, link)
    try:
        yield
    except ConfigurationError:
        for name, link in kept.items():
            if link.exists():
                os.replace(link, run_dir / name)
        raise
    finally:
        for link in kept.values():
            link.unlink(missing_ok=True)


def launcher_of(run_dir: Path) -> int | None:
    """Return the process id of this machine's `parashard run` that holds a folder, or None, without taking the lock."""
    try:
        pid, lock = int((run_dir / LOCK_FILE).read_text()), os.stat(run_dir / LOCK_FILE)
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.path.samestat(os.stat(descriptor), lock):
                    return pid
    except (OSError, ValueError):
        pass  # it is gone, or of another user
    return None


def how_it_ended(run_dir: Path) -> tuple[str, str] | None:
    """Return state and reason of a run that is over; None while its launcher lives, or if it may be resumed."""
    report = read_report(run_dir)
    local = (run_dir / LOCK_FILE).exists()
    if (
        report.get("state") not in (("done", "failed", "stopped") if local else ("done",))
        or launcher_of(run_dir) is not None
    ):
        return None
    return str(report["state"]), str(report.get("reason", ""))


def read_record(file: Path) -> dict[str, Any]:
    """Return a JSON object in a run directory; empty if there is none yet, or an incomplete one."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_report(run_dir: Path) -> dict[str, Any]:
    """Return the report in a run directory, or an empty one if it has none yet."""
    return read_record(run_dir / REPORT_FILE)


def write_report(run_dir: Path, report: Mapping[str, Any]) -> None:
    """Replace a run's report atomically; durable when this returns. After OSError the old one is there."""
    write_durably(run_dir / REPORT_FILE, (json.dumps(report, indent=2) + "\n").encode())


def job_name_in(run_dir: Path) -> str:
    """Return the name of the job in a run directory; "" if this version cannot read its file."""
    try:
        return job_of_run(run_dir / JOB_FILE).job.job.name
    except ConfigurationError:
        return ""


def check_in_progress(where: str) -> None:
    """Refuse the directory of a run that is over, which has no coordinator; raise ConfigurationError."""
    ended = how_it_ended(Path(where))
    if ended is not None:
        raise ConfigurationError(f"{where} is over ({ended[0]}: {ended[1]}): it has no coordinator")
