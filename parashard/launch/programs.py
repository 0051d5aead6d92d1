"""Programs: which program a run belongs to, how to start that program again, and whether it still runs.

A program's later calls read the folders of its earlier runs, so these stay as long as it runs. Called by
`parashard.api`, `parashard.launch.stopping` and the command line.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from parashard.errors import ConfigurationError
from parashard.job.layers import Override
from parashard.launch.run_folders import RUNS_VARIABLE
from parashard.process.durable import write_durably
from parashard.process.run_files import CALLS_FILE, ORIGIN_FILE, PROGRAM_FILE, short_path

NOT_RESUMED = "ps.Coordinator"
RESUME_VARIABLE = "PARASHARD_RESUME"
"""In the environment of a program: 1, or the run that it goes on with."""
FLAGS_VARIABLE = "PARASHARD_RESUME_FLAGS"


class ResumeFlags(NamedTuple):
    """What `parashard resume` is told of a program's run: keys of its job, and the checkpoint to start from."""

    overrides: Sequence[Override] = ()
    from_checkpoint: str = ""


class Program(NamedTuple):
    """The program of a run.

    Attributes
    ----------
    call : str
        The call that the run is of: fit, ps.Cluster or ps.Coordinator.
    script : str
        The path of its script; "": it has none, such as a notebook.
    words, folder : tuple of str, str
        The command that starts it again, and where; empty where it has no script.
    pid, began : int
        The process, and when that began (clock ticks since the machine did): process ids are used again.
    """

    call: str
    script: str = ""
    words: tuple[str, ...] = ()
    folder: str = ""
    pid: int = 0
    began: int = 0

    @property
    def is_running(self) -> bool:
        """Whether its process is on this machine and alive."""
        return self.pid > 0 and process_began(self.pid) == self.began


def process_began(pid: int) -> int:
    """Return when a process began, in clock ticks since the machine did; 0 if there is none."""
    with suppress(OSError, ValueError, IndexError):
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(after_name[19]) if after_name[0] not in "ZX" else 0  # a zombie runs no more
    return 0


def write_program(run_dir: Path, program: Program) -> None:
    """Record the program of a run in its folder."""
    write_durably(run_dir / PROGRAM_FILE, json.dumps(program._asdict()).encode())


def program_of(run_dir: Path) -> Program | None:
    """Return the program of a run; None: the run has a job file."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((run_dir / PROGRAM_FILE).read_text())
        return Program(
            str(found["call"]),
            str(found["script"]),
            tuple(map(str, found["words"])),
            str(found["folder"]),
            int(found["pid"]),
            int(found["began"]),
        )
    with suppress(OSError, ValueError, TypeError, KeyError):  # of a version without that record
        path = Path(json.loads((run_dir / ORIGIN_FILE).read_text())["job_file"])
        return Program("fit", str(path)) if path.suffix == ".py" else None
    return None


def answers_in(run_dir: Path) -> list[dict[str, Any]]:
    """Return what the calls before a run of a script returned; of any other run, nothing."""
    try:
        found = json.loads((run_dir / CALLS_FILE).read_text())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def start_again(run_dir: Path, program: Program, flags: ResumeFlags) -> NoReturn:
    """Become the program of a run, started again to go on with that run.

    Raises ConfigurationError if it cannot be started again.
    """
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
    """Return the runs whose workers, or whose resumption, read the folder of an earlier run of their script."""
    asked = run_dir.resolve()
    return [
        other
        for other in others
        if any(Path(str(answer.get("run_dir", "/"))).resolve() == asked for answer in answers_in(other))
    ]
