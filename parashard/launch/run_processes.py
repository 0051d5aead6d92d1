"""Processes of a run on this machine, found as the children of its launcher in /proc, and signals to one of them.

Called by `parashard kill`.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

from parashard.errors import ConfigurationError
from parashard.launch.local_cluster import MODULES, WORKER_ARGUMENTS
from parashard.launch.run_folders import launcher_of

PROC = Path("/proc")


def processes_of(run_dir: Path) -> dict[str, int]:
    """Return the process ids of a run by name: coordinator, shard-0, worker-1.

    Raises ConfigurationError if the run is not in progress on this machine.
    """
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
    """Send a signal to one process of a run, and return its process id.

    Raises ConfigurationError if there is no such process.
    """
    processes = processes_of(run_dir)
    if name not in processes:
        raise ConfigurationError(f"{run_dir} has no process {name!r} now; it has {', '.join(processes) or 'none'}")
    pid = processes[name]
    try:
        descriptor = os.pidfd_open(pid)
        try:
            # The descriptor cannot come to mean another process; check once more that it is of this run.
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
    """Return the parent's process id: the second field after the bracketed command, which may have any character."""
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
