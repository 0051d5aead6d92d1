"""ProxiedCluster: a local cluster whose processes reach each other through a proxy's links, and can be struck.

Owns the links: one to each shard, one to the coordinator for each process that connects to it, and one for whoever
reads its address in the run directory. A shard listens at two ports; its one link has a way to each, and what befalls
the link befalls both, as if the network between two hosts had failed. Does not know when a fault is due. Called by
`parashard.launch.run`, as any local cluster, and by the campaign, whose `Field` it is.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from parashard.chaos.proxy import Faults, Link, Proxy
from parashard.chaos.small_disk import SmallDisk
from parashard.launch.local_cluster import END_GRACE_S, LocalCluster
from parashard.process import failpoints

COORDINATOR = "coordinator"
STRAYS_MAX = 4  # at a time


class ProxiedCluster(LocalCluster):
    """Children that connect to fronts of a proxy.

    A child is started with other arguments than asked for: `--connect` names the front of its own link to the
    coordinator; the coordinator and shards get `--advertise`, and shards `--advertise-data`, the fronts of the link to
    them, and `--address-file`, where the link finds its backends.

    Parameters
    ----------
    run_dir : Path
        Where logs go, and the address files: `chaos/NAME.json`.
    proxy : Proxy
        Running; its links last as long as it does.
    shards, workers : int
        How many the job begins with.
    before_end : callable
        Called once before the children are ended: whoever strikes them must have stopped.
    """

    def __init__(self, run_dir: Path, proxy: Proxy, shards: int, workers: int, before_end: Callable[[], None]) -> None:
        super().__init__(run_dir)
        self._folder = run_dir / "chaos"
        self._folder.mkdir(exist_ok=True)
        self._disk = SmallDisk(run_dir)
        self._before_end = before_end
        self._commands: dict[str, tuple[str, list[str]]] = {}  # of each service, as it was started last
        self._strays: list[subprocess.Popen[bytes]] = []
        services = [COORDINATOR, *(f"shard-{index}" for index in range(shards))]
        self.processes = (*services, *(f"worker-{index}" for index in range(workers)))
        # By name; of each the ways that suffer together, by the flag that tells a child the way's front.
        self._links: dict[str, dict[str, Link]] = {}
        for name in services:
            self._links[name] = {"--advertise": self._open(proxy, name, name, "address")}
            if name != COORDINATOR:
                self._links[name]["--advertise-data"] = self._open(proxy, f"{name} data", name, "data_address")
        for name in self.processes[1:]:
            link = _to_coordinator(name)
            self._links[link] = {"--connect": self._open(proxy, link, COORDINATOR, "address")}

    @property
    def links(self) -> tuple[str, ...]:
        """Names of all links: "shard-0" leads there, "worker-0>coordinator" is that worker's own."""
        return tuple(self._links)

    def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Start a child, with the addresses of links in the place of the true ones."""
        arguments = list(arguments)
        own = self._links.get(_to_coordinator(name))
        if own is not None and "--connect" in arguments:
            arguments[arguments.index("--connect") + 1] = own["--connect"].address
        ways = self._links.get(name)
        if ways is not None:
            file = self._address_file(name)
            file.unlink(missing_ok=True)  # an earlier life's port may be somebody else's by now
            arguments += [part for flag, way in ways.items() for part in (flag, way.address)]
            arguments += ["--address-file", str(file)]
            self._commands[name] = module, arguments
        super().start(name, module, arguments)

    def end(self, grace_s: float = END_GRACE_S) -> None:
        """End every child, once nobody strikes any more."""
        self._before_end()
        for stray in self._strays:
            stray.kill()
            stray.wait()
        super().end(grace_s)

    # --- the campaign's field ---

    def ready(self) -> bool:
        """Tell whether every process that the job begins with is running."""
        return set(self.processes) <= set(self.running)

    def signal(self, process: str, number: int) -> bool:
        """Send a signal to a child; return whether it was running."""
        child = self._children.get(process)
        if child is None or child.poll() is not None:
            return False
        child.send_signal(number)
        return True

    def stray(self, process: str) -> bool:
        """Start a service a second time; it is killed as soon as it has claimed an incarnation (P23)."""
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

    def suffer(self, link: str, faults: Faults) -> None:
        """Have a link suffer these faults from now on, and no others, on all of its ways."""
        for way in self._links[link].values():
            way.suffer(faults)

    def reset(self, link: str) -> None:
        """Reset every connection of a link, on all of its ways."""
        for way in self._links[link].values():
            way.reset()

    def fill_disk(self) -> None:
        """Write until nothing more fits onto the file system of the run directory."""
        self._disk.fill()

    def free_disk(self) -> None:
        """Remove what was written for that."""
        self._disk.free()

    def _open(self, proxy: Proxy, name: str, backend: str, key: str) -> Link:
        file = self._address_file(backend)
        return proxy.link(name, lambda: listening_at(file, key))

    def _address_file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _to_coordinator(name: str) -> str:
    return f"{name}>{COORDINATOR}"


def listening_at(file: Path, key: str) -> tuple[str, int] | None:
    """Return host and port that a service wrote under a key of its address file; None until it has."""
    try:
        host, _, port = str(json.loads(file.read_text())[key]).rpartition(":")
        return host.strip("[]"), int(port)
    except (OSError, ValueError, KeyError, TypeError):
        return None
