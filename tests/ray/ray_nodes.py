"""RayNodes: a real Ray of several nodes on this machine, each a `ray start` with an address of 127.0.0.0/8 of its own.

Needs no root. Nodes start one after the other: two at once take the same names of sockets. Whatever came of them
has a log below their folder open, which is how `down` finds also what has lost its parent.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.cluster_run import eventually
from support.command_run import DIES_WITH_US

RAY = Path(sys.executable).with_name("ray")
HEALTH = {"initial_delay_ms": 1000, "period_ms": 500, "timeout_ms": 10_000, "failure_threshold": 3}
"""Of the head: a lost node, which refuses the connection, is told within two seconds; a busy one has time to answer."""
HEAD = f"{'f' * 51}00000"
"""The head's id where an autoscaler starts the other nodes, which counts on. Ray's `AutoscalingCluster` needs a file
that the package lacks, and ends every Ray of the machine before it starts."""
COMMANDS = (
    *("cluster_synced_files", "initialization_commands", "setup_commands", "head_setup_commands"),
    *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
)
BY_NODE_ID = {"use_node_id_as_ip": True, "disable_node_updaters": True, "launch_multiple": True}
"""Of a provider whose nodes have one address, which are up once they are started."""
AUTOSCALING = {
    "cluster_name": "nodes",
    "max_workers": 8,
    "idle_timeout_minutes": 5,
    "upscaling_speed": 8,
    "head_node_type": "ray.head.default",
    **{key: {} for key in ("auth", "docker", "file_mounts")},
    **{key: [] for key in COMMANDS},
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "one-cpu": {"resources": {"CPU": 1, "object_store_memory": 80_000_000}, "node_config": {}, "max_workers": 8},
    },
}
STARTS_MAX = 3

OF_RAY_DATA = ("_StatsActor", "_AutoscalingCoordinatorActor", "_UsageCollectionActor")  # they stay until Ray ends
ASK = """
import json, ray
from ray._private.state import actors
from ray.util import placement_group_table
ray.init("{address}", log_to_driver=False, logging_level="ERROR")
print("answer:" + json.dumps({expression}))
"""


class RayNodes:
    """Nodes by name, such as "node2", which is also a resource that the node has once, and its label `name`."""

    def __init__(
        self,
        count: int,
        cpus: int = 4,
        gpus: int = 0,
        silent_ms: int = HEALTH["timeout_ms"],
        autoscales: bool = False,
        **environ: str,
    ) -> None:
        self._has = [f"--num-cpus={cpus}", f"--num-gpus={gpus}"]  # each node but the head; Ray looks for no GPU then
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie below it
        self._environ = {
            **os.environ,
            **environ,
            **{f"RAY_health_check_{name}": str(value) for name, value in {**HEALTH, "timeout_ms": silent_ms}.items()},
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))
            self.address = f"127.0.0.2:{probe.getsockname()[1]}"
        self._head = ["--num-cpus=0", "--head", f"--port={self.address.rpartition(':')[2]}"]
        self._head += ["--include-dashboard=false", f"--temp-dir={self._folder / 't'}"]
        if autoscales:
            provider = {"type": "fake_multinode", "gcs_address": self.address, **BY_NODE_ID}
            written = self._folder / "autoscaling.json"
            written.write_text(json.dumps({**AUTOSCALING, "provider": provider}))
            self._head.append(f"--autoscaling-config={written}")
            # The third puts its nodes on loopback, as Ray does by itself on platforms other than Linux.
            self._environ |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
            self._environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD}
        try:
            for _ in range(count):
                self.add()
        except BaseException:
            self.down()
            raise

    @property
    def last(self) -> str:
        """The newest node."""
        return list(self._nodes)[-1]

    def add(self) -> None:
        """Start a node; the first is the head."""
        for _ in range(STARTS_MAX):
            self._started += 1
            if self._add(f"node{self._started}"):
                return
        pytest.fail(f"no node of Ray starts: {(self._folder / f'node{self._started}.log').read_text()}")

    def _add(self, name: str) -> bool:
        """Start a node; return whether it has started: Ray gives up after 30 s on a busy machine."""
        log = self._folder / f"{name}.log"
        words = self._head if not self._nodes else [f"--address={self.address}", *self._has]
        resources, host = f'{{"{name}": 1}}', self._started + 1 if self._nodes else 2
        flags = [f"--node-ip-address=127.0.0.{host}", f"--node-name={name}", f"--resources={resources}"]
        flags += [f"--labels=name={name}", "--object-store-memory=80000000", "--log-style=record"]
        flags += ["--include-log-monitor=false", "--disable-usage-stats", "--block"]
        with log.open("wb") as out:
            self._nodes[name] = subprocess.Popen(
                [*DIES_WITH_US, str(RAY), "start", *words, *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._environ,
                start_new_session=True,
            )

        def is_over() -> bool:
            return self._nodes[name].poll() is not None or "Ray runtime started" in log.read_text()

        eventually(is_over, f"{name} starts", told=log.read_text)
        if self._nodes[name].poll() is None:
            return True
        self._nodes.pop(name)
        return False

    def kill(self, name: str) -> None:
        """Take a node away at once, with all that ran on it, as a machine that loses its power."""
        node = self._nodes.pop(name)
        _kill([node.pid, *_tree(node.pid)])
        node.wait()

    def lose_head(self) -> Callable[[], None]:
        """Kill the head's server (GCS) alone, as where it is on another machine; return what starts another one."""
        start = next(iter(self._nodes.values()))
        server = next(pid for pid in _tree(start.pid) if _words(pid)[0].endswith("/gcs_server"))
        command = [word for word in _words(server) if word]
        os.kill(start.pid, signal.SIGSTOP)  # it would end the rest of its node
        os.kill(server, signal.SIGKILL)

        def again() -> None:
            null = subprocess.DEVNULL
            self._nodes["another head"] = subprocess.Popen(
                command, stdin=null, stdout=null, stderr=null, env=self._environ
            )

        return again

    def drain(self, name: str, deadline_s: int) -> None:
        """Say that a node will go: Ray places nothing there any more."""
        flags = {
            "address": self.address,
            "node-id": self._asked(f"[n['NodeID'] for n in ray.nodes() if n['NodeName'] == {name!r}]")[0],
            "reason": "DRAIN_NODE_REASON_PREEMPTION",
            "reason-message": "it is wanted elsewhere",
            "deadline-remaining-seconds": deadline_s,
        }
        subprocess.run(
            [str(RAY), "drain-node", *(f"--{flag}={value}" for flag, value in flags.items())],
            env=self._environ,
            check=True,
            capture_output=True,
        )

    def is_up(self, name: str) -> bool:
        """Tell whether a node's `ray start` runs."""
        return self._nodes[name].poll() is None

    def raylet(self, name: str) -> int:
        """Return the process id of a node's raylet."""
        return next(pid for pid in _tree(self._nodes[name].pid) if _words(pid)[0].endswith("/raylet"))

    def node_of(self, pid: int) -> str:
        """Return the name of the node that a process runs on; "" once it is gone."""
        return next((name for name, node in self._nodes.items() if pid in _tree(node.pid)), "")

    def cpus(self) -> list[float]:
        """Return how many CPUs each node has that Ray takes to be alive, the head's among them."""
        return sorted(self._asked("[n['Resources'].get('CPU', 0) for n in ray.nodes() if n['Alive']]"))

    def stop(self, name: str, *, with_all: bool) -> list[int]:
        """Let a node's raylet stand still, and all below it if wanted; return the processes, to be continued."""
        raylet = self.raylet(name)
        stopped = [raylet, *(_tree(raylet) if with_all else ())]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        return stopped

    def left(self) -> tuple[list[str], list[str]]:
        """Return the names of the actors and the placement groups that are not over, but for Ray Data's actors."""
        groups = "[g for g, at in placement_group_table().items() if at['state'] != 'REMOVED']"
        actors, groups = self._asked(
            f"([at['ActorClassName'] for at in actors().values() if at['State'] != 'DEAD'], {groups})"
        )
        return [name for name in actors if name not in OF_RAY_DATA], groups

    def _asked(self, expression: str) -> Any:
        """Return a value of Ray's, from a process of its own: a driver of this one would be in the way of tests."""
        program = ASK.format(address=self.address, expression=expression)
        answer = subprocess.run([sys.executable, "-c", program], env=self._environ, check=True, capture_output=True)
        found = re.findall(r"^answer:(.*)$", answer.stdout.decode(), re.MULTILINE)  # an autoscaler prints there, too
        return json.loads(found[0])

    def processes(self) -> list[int]:
        """Return the processes that came of these nodes, as far as they can be told."""
        trees = [pid for node in self._nodes.values() for pid in (node.pid, *_tree(node.pid))]
        return sorted({*trees, *_users(self._folder)})

    def down(self) -> None:
        """End everything."""
        _kill(self.processes())
        for node in self._nodes.values():
            node.wait()
        self._nodes.clear()
        eventually(lambda: not self.processes(), "every process of Ray is gone", told=self.processes)
        shutil.rmtree(self._folder, ignore_errors=True)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _tree(pid: int) -> Iterator[int]:
    """Yield what descends from a process."""
    with suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                yield child
                yield from _tree(child)


def _words(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return [""]


def _users(folder: Path) -> Iterator[int]:
    """Yield the processes that have a file of a folder open, as all of Ray's have their logs."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if any(os.readlink(file).startswith(f"{folder}/") for file in (entry / "fd").iterdir()):
                    yield int(entry.name)


def processes_of_run(address: str) -> dict[str, int]:
    """Return the shards and workers that were told to find their coordinator at an address, by name."""
    found = {}
    for entry in Path("/proc").iterdir():
        words = _words(int(entry.name)) if entry.name.isdecimal() else []
        if "--connect" in words and words[words.index("--connect") + 1] == address:
            flag = "--index" if "--index" in words else "--name"
            label = words[words.index(flag) + 1]
            found[f"shard-{label}" if flag == "--index" else label] = int(entry.name)
    return found
