"""ProxiedCluster: a local cluster whose processes connect through a proxy's links, with injected faults.

Owns the links: one to each shard, one to the coordinator for each process that connects to it, and one for readers of
its address in the run directory. A shard listens at two ports; its link has a proxy address for each, and a fault
affects both, as if the network between two hosts had failed.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from parashard.chaos.proxy import LinkFaults, ProxiedLink, Proxy
from parashard.errors import ConfigurationError
from parashard.launch.local_cluster import LocalCluster, Process
from parashard.launch.starting import END_GRACE_S
from parashard.process import failpoints
from parashard.process.addresses import split_address
from parashard.process.threads import ThreadChild

SMALL_BYTES_MAX = 256 << 20
PIECE_BYTES = (1 << 20, 4096, 1)
FILLER_FILE = "filler"


def check_small(folder: Path) -> None:
    """Refuse a folder whose file system is larger than `SMALL_BYTES_MAX`."""
    found = os.statvfs(folder)
    size_bytes = found.f_blocks * found.f_frsize
    if size_bytes > SMALL_BYTES_MAX:
        raise ConfigurationError(
            f"--disk fills the file system of the run directory: {folder} is on one of {size_bytes >> 20} MiB; allowed "
            f"are at most {SMALL_BYTES_MAX >> 20} MiB, such as mount -t tmpfs -o size=32m tmpfs FOLDER, with "
            "--run-dir FOLDER/run"
        )


class SmallDisk:
    """The file system of a folder."""

    def __init__(self, folder: Path) -> None:
        self._filler = folder / FILLER_FILE

    def fill(self) -> None:
        """Write until the disk is full to the last byte; at most `SMALL_BYTES_MAX`."""
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            for piece_bytes in PIECE_BYTES:
                piece = bytes(piece_bytes)
                try:
                    while os.fstat(descriptor).st_size < SMALL_BYTES_MAX:
                        os.write(descriptor, piece)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Remove the filler file."""
        with suppress(FileNotFoundError):
            self._filler.unlink()


COORDINATOR = "coordinator"
STRAYS_MAX = 4  # at a time


class ProxiedCluster(LocalCluster):
    """Children that connect through a proxy: the addresses in their arguments are replaced by its links' fronts."""

    def __init__(self, run_dir: Path, proxy: Proxy, shards: int, workers: int, before_end: Callable[[], None]) -> None:
        super().__init__(run_dir)
        self._folder = run_dir / "chaos"
        self._folder.mkdir(exist_ok=True)
        self._disk = SmallDisk(run_dir)
        self._before_end = before_end
        self._commands: dict[str, tuple[str, list[str]]] = {}  # of each service, as last started
        self._strays: list[Process] = []
        services = [COORDINATOR, *(f"shard-{index}" for index in range(shards))]
        self.processes = (*services, *(f"worker-{index}" for index in range(workers)))
        # By the link's name, its proxied addresses by the flag that passes each.
        self._links: dict[str, dict[str, ProxiedLink]] = {}
        for name in services:
            self._links[name] = {"--advertise": self._open(proxy, name, name, "address")}
            if name != COORDINATOR:
                self._links[name]["--advertise-data"] = self._open(proxy, f"{name} data", name, "data_address")
        for name in self.processes[1:]:
            link = _to_coordinator(name)
            self._links[link] = {"--connect": self._open(proxy, link, COORDINATOR, "address")}

    @property
    def links(self) -> tuple[str, ...]:
        """Names of all links: "shard-0" is the link to it, "worker-0>coordinator" that worker's to the coordinator."""
        return tuple(self._links)

    def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Start a child with the addresses of links instead of the true ones."""
        arguments = list(arguments)
        own = self._links.get(_to_coordinator(name))
        if own is not None and "--connect" in arguments:
            arguments[arguments.index("--connect") + 1] = own["--connect"].address
        ways = self._links.get(name)
        if ways is not None:
            file = self._address_file(name)
            file.unlink(missing_ok=True)  # the port of an earlier incarnation may have another owner by now
            arguments += [part for flag, way in ways.items() for part in (flag, way.address)]
            arguments += ["--address-file", str(file)]
            self._commands[name] = module, arguments
        super().start(name, module, arguments)

    def end(self, grace_s: float = END_GRACE_S) -> None:
        """Stop the campaign, then end every child."""
        self._before_end()
        for stray in self._strays:
            stray.kill()
            stray.wait()
        super().end(grace_s)

    # --- faults, scheduled by `parashard.chaos.campaign` ---

    def ready(self) -> bool:
        """Return whether every initial process of the job is running."""
        return set(self.processes) <= set(self.running)

    def signal(self, process: str, number: int) -> bool:
        """Send a signal to a child; return whether it was running."""
        child = self._children.get(process)
        if child is None or isinstance(child, ThreadChild) or child.poll() is not None:
            return False
        child.send_signal(number)
        return True

    def stray(self, process: str) -> bool:
        """Start a duplicate of a service, which is killed as soon as it has claimed an incarnation."""
        self._strays = [stray for stray in self._strays if stray.poll() is None]
        if process not in self._commands or len(self._strays) >= STRAYS_MAX:
            return False
        module, arguments = self._commands[process]
        role = process.partition("-")[0]
        dies = {
            failpoints.SPEC_VARIABLE: f"{role}.boot.claimed=kill@1*{failpoints.TIMES_MAX}",
            failpoints.FOLDER_VARIABLE: str(self._folder),
        }
        self._strays.append(self._spawn(f"{process}-stray", module, arguments, dies))
        return True

    def set_faults(self, link: str, faults: LinkFaults) -> None:
        """Set the present faults of a link, for all of its addresses."""
        for way in self._links[link].values():
            way.set_faults(faults)

    def reset(self, link: str) -> None:
        """Reset every connection of a link, at all of its addresses."""
        for way in self._links[link].values():
            way.reset()

    def fill_disk(self) -> None:
        self._disk.fill()

    def free_disk(self) -> None:
        self._disk.free()

    def _open(self, proxy: Proxy, name: str, backend: str, key: str) -> ProxiedLink:
        file = self._address_file(backend)
        return proxy.link(name, lambda: listening_at(file, key))

    def _address_file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _to_coordinator(name: str) -> str:
    return f"{name}>{COORDINATOR}"


def listening_at(file: Path, key: str) -> tuple[str, int] | None:
    """Return the host and port under a key of a service's address file; None until it is written."""
    try:
        return split_address(str(json.loads(file.read_text())[key]))
    except (OSError, ValueError, KeyError, TypeError, ConfigurationError):
        return None
