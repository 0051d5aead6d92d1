"""HostedJob: one job on five hosts, inside TLS, whose processes are started again where they end with an error.

Does what an engine does that starts processes and knows nothing else (`cluster.launcher = "external"`): each has a host
and a command, and an exit code other than 0 brings it back after a moment, as `restart: on-failure` does with compose.
Knows no fault and no verdict on weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from network_hosts import Host, Hosts

from parashard.job.layers import parse_set
from parashard.job.load import as_toml, load_job
from parashard.launch.local_cluster import MODULES
from parashard.process.run_files import JOB_FILE
from parashard.process.shell import ExitCode

PORT, DATA_PORT, HTTP_PORT = 7100, 7101, 9100
AGAIN_S = 1.0  # before a process that ended is started again
ASK_S = 2.0  # for the coordinator's status
LINGER_S = 5.0  # of the coordinator, in which all others hear of the end
PLACES: Mapping[str, str] = {
    "coordinator": "coordinator",
    "shard-0": "shard-0",
    "shard-1": "shard-1",
    "worker-0": "shard-0",  # beside a shard, which it reaches by shared memory where the job allows that
    "worker-1": "shard-1",
    "worker-2": "worker-2",
    "worker-3": "worker-3",
}
"""The host of each process; a host has the name of its first one."""

HOSTS = tuple(dict.fromkeys(PLACES.values()))
WORKERS = tuple(name for name in PLACES if name.startswith("worker"))
WELL = (ExitCode.FENCED, ExitCode.IO_ERROR, ExitCode.RETRY, -9)
"""How a process may end under faults: another start helps. The last: its host lost its power."""


def status_at(host: Host, address: str) -> dict[str, Any] | None:
    """Return what a coordinator with this HTTP address says to a host, as `parashard status --json` does; or None."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError, ValueError):
        return dict(json.loads(host.within(lambda: direct.open(f"http://{address}/status.json", timeout=ASK_S).read())))
    return None


@dataclass
class _Service:
    name: str
    words: Sequence[str]
    log: IO[bytes]
    process: subprocess.Popen[bytes] | None = None
    again_s: float = 0.0  # when to start it, while there is no process
    done: bool = False


@dataclass
class HostedJob:
    """The processes of a job; a context manager, whose exit ends what is left of them."""

    hosts: Hosts  # where they run
    folder: Path  # on the disk that all hosts share; the run's folder, certificates and logs are in it
    file: str  # the job file, beside a model of its own
    sets: Sequence[str]  # over the file, such as `cluster.transport="tcp"`
    exits: Counter[int] = field(default_factory=Counter)  # exit codes so far, but for 0
    broken: list[str] = field(default_factory=list)  # ends that no fault explains, with the last line of the log

    def __post_init__(self) -> None:
        self.run_dir = self.folder / "run"
        self._services: list[_Service] = []

    def __enter__(self) -> Self:
        for folder in (self.run_dir, self.folder / "logs"):
            folder.mkdir(parents=True)
        certs = [sys.executable, "-P", "-m", "parashard", "certs", "cluster", "authority", "tls", "--shards=2"]
        subprocess.run(certs, cwd=self.folder, check=True, capture_output=True)
        overrides = [
            *self.sets,
            *("cluster.launcher=external", "cluster.shards=2", f"cluster.workers={len(WORKERS)}"),
        ]
        loaded = load_job(Path(self.file), [parse_set(text) for text in overrides], environ={})
        (self.run_dir / JOB_FILE).write_text(as_toml(loaded.job))
        for name in PLACES:
            words = self._words(name, overrides)
            self._services.append(_Service(name, words, (self.folder / "logs" / f"{name}.log").open("ab")))
        return self

    def __exit__(self, *_: object) -> None:
        for service in self._services:
            if service.process is not None:
                service.process.kill()
            service.log.close()

    def _words(self, name: str, overrides: Sequence[str]) -> list[str]:
        role, _, index = name.partition("-")
        tls = self.folder / "tls" / (name if role == "shard" else role)
        words = [sys.executable, "-P", "-m", MODULES[role], f"--tls-dir={tls}"]
        if role == "coordinator":
            words += [f"--host={name}", f"--port={PORT}", f"--http-port={HTTP_PORT}", f"--linger-s={LINGER_S}"]
            words += [
                f"--job={self.file}",
                f"--model-folder={Path(self.file).parent}",
                f"--run-dir={self.run_dir}",
                "--run-id=hosts",
            ]
            return [*words, *(word for text in overrides for word in ("--set", text))]
        words.append(f"--connect=coordinator:{PORT}")
        if role == "shard":
            words += [f"--host={name}", f"--index={index}", "--linger-s=0"]
            return [*words, f"--port={PORT}", f"--data-port={DATA_PORT}", f"--http-port={HTTP_PORT}"]
        return [*words, "--host=auto", f"--name={name}", f"--model-folder={Path(self.file).parent}"]

    def tend(self) -> None:
        """Start what is to be started, and see what has ended."""
        now_s = time.monotonic()
        for service in self._services:
            code = None if service.process is None else service.process.poll()
            if code is not None:
                service.process, service.again_s = None, now_s + AGAIN_S
                service.done = code == ExitCode.DONE
                if code != ExitCode.DONE:
                    self.exits[code] += 1
                    if code not in WELL:
                        self.broken.append(f"{service.name} ended with {code}: {self.last_line(service.name)}")
            host = self.hosts.by_name[PLACES[service.name]]
            if service.process is None and not service.done and not host.is_off and now_s >= service.again_s:
                service.process = host.start(service.words, service.log)

    @property
    def running(self) -> list[str]:
        """The processes that have not ended well."""
        return [service.name for service in self._services if not service.done]

    def last_line(self, name: str) -> str:
        """Return the last line of a process's log."""
        lines = (self.folder / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else ""

    def status(self) -> dict[str, Any] | None:
        """Return what the coordinator says of the job; None: nothing now."""
        host = self.hosts.by_name["coordinator"]
        return status_at(host, f"{host.address}:{HTTP_PORT}")

    def report(self) -> dict[str, Any]:
        """Return the report; empty where there is none."""
        with suppress(FileNotFoundError):
            return dict(json.loads((self.run_dir / "report.json").read_text()))
        return {}
