"""Starter: the interface for starting a job's shards and workers, on this machine or on others.

A starter decides nothing: `parashard.launch.running` calls it as the coordinator orders. The coordinator itself is
always a child of the launcher (`parashard.launch.local_cluster`, which is a `Starter`, too).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from parashard.store import open_store

END_GRACE_S = 5.0
POLL_S = 0.02
PROBE_BYTES_MAX = 64


@dataclass(frozen=True)
class Ended:
    """A process that ended."""

    name: str
    exit_code: int  # the negative number of the signal that killed it
    reason: str
    number: int  # rises with every ended process of its starter


class Starter(Protocol):
    """Processes by name, such as "shard-0" or "worker-1"; each runs at most once at a time.

    None outlives its starter, however that ends: each has a pipe that closes then. Every method returns soon, whatever
    other machines do; only `end` waits, for a bounded time.
    """

    launcher_address: str
    """The address of this machine at which its processes find the coordinator. "": they are on this machine, and find
    it by the run's folder."""

    @property
    def running(self) -> list[str]:
        """Names of the processes that have been started and not been reaped."""

    def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Start `python -P -m module arguments` under a new name; `reap` returns `IO_ERROR` where it cannot."""

    def reap(self) -> list[Ended]:
        """Return the processes that have ended since the last call; also those of a machine that was lost.

        Raises Unreachable once it can no longer start or end processes: then the run is ended.
        """

    def coming_ends(self) -> Mapping[str, float]:
        """Return running processes whose machine is about to go, each with its deadline (`time.monotonic`)."""

    def ask_to_end(self, name: str) -> None:
        """Send SIGTERM to a process if it is running."""

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process if it is running."""

    def end(self, grace_s: float = END_GRACE_S) -> None:
        """End every process, workers first; none is left, nor anything else of the starter, when this returns."""


def write_probe(store_url: str, folder: Path) -> str:
    """Write a probe by which another machine sees that it has the same store; return its name there."""
    # The name depends on the run's folder alone: the next launcher replaces and removes the probe of a killed one.
    probe = f"probe-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]}"
    open_store(store_url).replace(probe, b"")
    return probe


def end_in_turn(starter: Starter, grace_s: float) -> None:
    """Ask all processes to end, and wait for `grace_s`: first for workers, since they need the others to finish."""
    for role in ("worker", ""):
        deadline_s = time.monotonic() + grace_s
        for name in starter.running:
            if name.startswith(role):
                starter.ask_to_end(name)
        while any(name.startswith(role) for name in starter.running) and time.monotonic() < deadline_s:
            starter.reap()
            time.sleep(POLL_S)


def self_removing_folder() -> Path:
    """Create a folder that only this user can read; another process removes it once this one has ended."""
    folder = tempfile.mkdtemp(prefix="parashard-")
    read, _ = os.pipe()  # which children do not inherit
    # The process that removes keys must survive a signal to the whole session, as at a shutdown. It is not a child of
    # this one: an actor of Ray kills its children.
    script = '(trap "" HUP INT TERM; read -r _; rm -rf -- "$0") <&3 &'
    command, null = ["/bin/sh", "-c", f"exec 3<&0; {script}", folder], subprocess.DEVNULL
    subprocess.run(command, stdin=read, stdout=null, stderr=null, start_new_session=True, cwd="/", check=True)
    os.close(read)
    return Path(folder)
