"""Record, find and restart the program that a run belongs to; find the run's own processes, and send them signals.

A program's later calls read the folders of its earlier runs, so these must stay while it runs. The processes of a run
in progress on this machine are the children of its launcher in /proc.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from parashard.errors import ConfigurationError
from parashard.job.layers import Override
from parashard.launch.local_cluster import MODULES, WORKER_ARGUMENTS
from parashard.launch.run_folders import RUNS_VARIABLE, launcher_of, read_record
from parashard.process.durable import write_durably
from parashard.process.run_files import CALLS_FILE, ORIGIN_FILE, PROGRAM_FILE, short_path

NOT_RESUMED = "ps.Coordinator"
RESUME_VARIABLE = "PARASHARD_RESUME"
"""In the environment of a program: 1, or the run to resume."""
FLAGS_VARIABLE = "PARASHARD_RESUME_FLAGS"
PROC = Path("/proc")


class ResumeFlags(NamedTuple):
    """Flags of `parashard resume` for a program's run: keys of its job, and the checkpoint to start from."""

    overrides: Sequence[Override] = ()
    from_checkpoint: str = ""


class Program(NamedTuple):
    """The program of a run."""

    call: str  # the call that began the run: fit, ps.Cluster or ps.Coordinator
    script: str = ""  # its path; "": it has none, such as a notebook
    words: tuple[str, ...] = ()  # the command that starts it again; empty where it has no script
    folder: str = ""  # that the command runs in
    pid: int = 0
    began: int = 0  # when it began, in clock ticks since the machine did: process ids are reused

    @property
    def is_running(self) -> bool:
        """Whether its process is on this machine and alive."""
        return self.pid > 0 and process_began(self.pid) == self.began


def process_began(pid: int) -> int:
    """Return when a process began, in clock ticks since the machine did; 0 if there is none."""
    with suppress(OSError, ValueError, IndexError):
        state, began = (_stat(PROC / str(pid))[place] for place in (0, 19))
        return int(began) if state not in "ZX" else 0  # a zombie no longer runs
    return 0


def write_program(run_dir: Path, program: Program) -> None:
    """Record the program of a run in its folder."""
    write_durably(run_dir / PROGRAM_FILE, json.dumps(program._asdict()).encode())


def program_of(run_dir: Path) -> Program | None:
    """Return the program of a run, or None if the run has a job file."""
    found = read_record(run_dir / PROGRAM_FILE)
    with suppress(ValueError, TypeError, KeyError):
        return Program(
            str(found["call"]),
            str(found["script"]),
            tuple(map(str, found["words"])),
            str(found["folder"]),
            int(found["pid"]),
            int(found["began"]),
        )
    path = str(read_record(run_dir / ORIGIN_FILE).get("job_file", ""))  # an older version wrote no record
    return Program("fit", path) if path.endswith(".py") else None


def answers_in(run_dir: Path) -> list[dict[str, Any]]:
    """Return the results of a script's calls before its run; empty for any other run."""
    try:
        found = json.loads((run_dir / CALLS_FILE).read_text())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def start_again(run_dir: Path, program: Program, flags: ResumeFlags) -> NoReturn:
    """Replace this process by the program of a run, restarted to resume it; ConfigurationError if it cannot be."""
    where = short_path(run_dir)
    if program.call == NOT_RESUMED:
        raise ConfigurationError(f"{where} is of {NOT_RESUMED}, which cannot go on with a run: start its program anew")
    if not program.script:
        raise ConfigurationError(
            f"{where} is of a notebook, or of another program without a script: {program.call}(..., resume=True) goes "
            "on with it there"
        )
    if not program.words:
        raise ConfigurationError(
            f"{where} does not say how its script was started: {RESUME_VARIABLE}={shlex.quote(where)} python "
            f"{shlex.quote(short_path(Path(program.script)))} and its arguments go on with it"
        )
    if not Path(program.script).is_file():
        raise ConfigurationError(f"{where}: its script {program.script} is gone: bring it back")
    environ = {**os.environ, RESUME_VARIABLE: str(run_dir), FLAGS_VARIABLE: json.dumps(flags)}
    environ[RUNS_VARIABLE] = str(run_dir.parent)
    try:
        os.chdir(program.folder)
        os.execve(program.words[0], program.words, environ)
    except OSError as error:
        raise ConfigurationError(
            f"{where}: its script cannot be started again in {program.folder}: {error.strerror}"
        ) from None


def read_resume_flags(text: str) -> ResumeFlags:
    """Return the flags that `start_again` was given."""
    if not text:
        return ResumeFlags()
    overrides, from_checkpoint = json.loads(text)
    return ResumeFlags([(str(key), value, str(flag)) for key, value, flag in overrides], str(from_checkpoint))


def readers_of(run_dir: Path, others: Sequence[Path]) -> list[Path]:
    """Return those of `others` that read this run's folder, because they are later runs of the same script."""
    asked = run_dir.resolve()
    return [
        other
        for other in others
        if any(Path(str(answer.get("run_dir", "/"))).resolve() == asked for answer in answers_in(other))
    ]


def processes_of(run_dir: Path) -> dict[str, int]:
    """Return the process ids of a run by name, such as shard-0; ConfigurationError if it is not in progress here."""
    launcher = launcher_of(run_dir)
    if launcher is None:
        raise ConfigurationError(f"{run_dir} is not in progress on this machine; `parashard resume` goes on with a run")
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended meanwhile
                if _parent_of(entry) == launcher:
                    name = name_in(_words(entry / "cmdline")) or name_in_variables(_words(entry / "environ"))
                    found.update({name: int(entry.name)} if name else {})
    return dict(sorted(found.items()))


def send(run_dir: Path, name: str, number: signal.Signals) -> int:
    """Send a signal to a process of a run, and return its process id; ConfigurationError if there is none."""
    processes = processes_of(run_dir)
    if name not in processes:
        raise ConfigurationError(f"{run_dir} has no process {name!r} now; it has {', '.join(processes) or 'none'}")
    pid = processes[name]
    try:
        descriptor = os.pidfd_open(pid)
        try:
            # The descriptor cannot refer to a later process with this id; check once more that it is of this run.
            if _parent_of(PROC / str(pid)) != launcher_of(run_dir):
                raise ProcessLookupError(pid)
            signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        raise ConfigurationError(f"{run_dir}: {name} has just ended") from None
    return pid


def name_in(words: list[str]) -> str:
    """Return the name of a process in its command line, as `LocalCluster` starts it; "" for any other."""
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    role = next((role for role, started in MODULES.items() if started == module), "")
    if role == "coordinator":
        return role
    flag = {"shard": "--index", "worker": "--name"}.get(role)
    if flag is None or flag not in words[:-1]:
        return ""
    label = words[words.index(flag) + 1]
    return f"shard-{label}" if role == "shard" else label


def name_in_variables(variables: list[str]) -> str:
    """Return the name of a worker in the environment that `LocalCluster` started its script with; "" for any other."""
    given = next((text for text in variables if text.startswith(f"{WORKER_ARGUMENTS}=")), "")
    return name_in(["-m", MODULES["worker"], *json.loads(given.partition("=")[2])]) if given else ""


def _words(file: Path) -> list[str]:
    return file.read_bytes().decode(errors="replace").split("\0")


def _parent_of(entry: Path) -> int:
    return int(_stat(entry)[1])


def _stat(entry: Path) -> list[str]:
    """Return the fields after the bracketed command, which may have any character."""
    return (entry / "stat").read_text().rpartition(")")[2].split()
