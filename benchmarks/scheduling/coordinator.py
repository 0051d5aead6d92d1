"""A real coordinator process with stand-in shards and crowds of workers, and its resource use and answers meanwhile."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.request import urlopen

from parashard.errors import ParashardError
from parashard.plan.steps import PART_EXAMPLES_MIN
from parashard.process.starts import CoordinatorStart
from parashard.protocol.coordinator_client import CoordinatorClient, coordinator_in, find_coordinator

JOB = """
[job]
name = "load"
epochs = 100
batch_size = {batch_size}

[data]
source = "synthetic"
examples = {examples}
features = 1

[model]
kind = "ledger"

[optimizer]
kind = "sgd"
learning_rate = -1.0

[consistency]
policy = "{policy}"

[evaluation]
every_epochs = 0

[cluster]
shards = {shards}
workers = {workers}
launcher = "external"
partitioner = {{ kind = "fixed-shards" }}
"""
EXAMPLES = 1 << 20
CROWDS = 2  # processes
START_S = 60.0
POLL_S = 0.05
ASKED = 5  # times, for a median
PAGES = {"page": "", "status.json": "status.json", "metrics": "metrics"}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Used(NamedTuple):
    """Resource use of a process: CPU so far, memory and threads now."""

    cpu_s: float
    memory_mib: float
    threads: int


class Phase(NamedTuple):
    """Figures of a command of the crowds."""

    seconds: float
    counts: dict[str, int]
    latencies_s: list[float]
    cpu_share: float
    memory_mib: float
    threads: int
    working_s: float  # until the last report


def used(pid: int) -> Used:
    """Return a process's resource use, as the kernel counts it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory_kib = int(status["VmRSS"].split()[0])
    return Used((int(fields[11]) + int(fields[12])) / TICKS_PER_S, memory_kib / 1024, int(status["Threads"]))


class LoadedCoordinator:
    """One coordinator, its shards and workers, each crowd of which has joined."""

    def __init__(self, stack: ExitStack, policy: str, workers: int, shards: int) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parashard-load-")))
        job = folder / "job.toml"
        batch_size = PART_EXAMPLES_MIN * workers if policy == "auto" else 1
        job.write_text(
            JOB.format(policy=policy, workers=workers, shards=shards, batch_size=batch_size, examples=EXAMPLES)
        )
        start = CoordinatorStart(job=job, run_dir=folder)
        log = stack.enter_context((folder / "coordinator.log").open("wb"))
        self._log = Path(log.name)
        self._process = self._child(stack, ["parashard_coordinator", *start.words()], stderr=log)
        self.address = find_coordinator(str(folder), START_S)
        self._http = str(coordinator_in(folder)["http"])
        self._client = CoordinatorClient(self.address)
        stack.callback(self._client.close)
        self._child(stack, ["benchmarks.scheduling.shards", self.address, str(shards)], stdin=subprocess.PIPE)
        deadline_s = time.monotonic() + START_S
        while not all(shard.registered for shard in self._client.get_status().shards):
            assert time.monotonic() < deadline_s, "the shards have not registered"
            time.sleep(POLL_S)
        each = -(-workers // min(CROWDS, workers))
        self._crowds = [
            self._child(
                stack,
                ["benchmarks.scheduling.crowd", self.address, str(first), str(min(each, workers - first))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for first in range(0, workers, each)
        ]
        self._threads = stack.enter_context(ThreadPoolExecutor(len(self._crowds)))
        self.do("ready")

    @classmethod
    @contextmanager
    def of(cls, policy: str, workers: int, shards: int) -> Iterator[Self]:
        """Start everything, and end all of it."""
        with ExitStack() as stack:
            yield cls(stack, policy, workers, shards)

    def do(self, what: str, meanwhile: Callable[[], None] = lambda: None, **options: Any) -> Phase:
        """Have every crowd run a command, and return its figures."""
        before, began_s = used(self._process.pid), time.monotonic()
        told = [self._threads.submit(self._ask, crowd, {"do": what, **options}) for crowd in self._crowds]
        meanwhile()
        answers = [one.result() for one in told]
        seconds, after = time.monotonic() - began_s, used(self._process.pid)
        counts: dict[str, int] = {}
        for answer in answers:
            for name, count in answer["counts"].items():
                counts[name] = counts.get(name, 0) + count
        latencies_s = sorted(s for answer in answers for s in answer["latencies_s"])
        cpu_share = (after.cpu_s - before.cpu_s) / seconds
        working_s = max(answer["last_report_s"] for answer in answers) - began_s  # all processes have one clock
        return Phase(seconds, counts, latencies_s, cpu_share, after.memory_mib, after.threads, working_s)

    def views(self) -> dict[str, dict[str, float]]:
        """Return the median time and the size of the status, the page and the metrics, and the number of samples."""
        found = {"status": _asked(lambda: self._client.get_status().SerializeToString())}
        for name, path in PAGES.items():
            found[name] = _asked(lambda path=path: _read(f"http://{self._http}/{path}"))  # type: ignore[misc]
        lines = _read(f"http://{self._http}/metrics").splitlines()
        found["metrics"]["samples"] = sum(not line.startswith(b"#") for line in lines)
        return found

    def steps_complete(self) -> int:
        """Return how many steps are complete."""
        return int(self._client.get_status().steps_complete)

    def _ask(self, crowd: subprocess.Popen[bytes], command: dict[str, Any]) -> dict[str, Any]:
        assert crowd.stdin is not None
        assert crowd.stdout is not None
        crowd.stdin.write(json.dumps(command).encode() + b"\n")
        crowd.stdin.flush()
        line = crowd.stdout.readline()
        assert line, f"a crowd ended; the coordinator's log: {self._log.read_text()[-2000:]}"
        told: dict[str, Any] = json.loads(line)
        return told

    @staticmethod
    def _child(stack: ExitStack, words: list[str], **pipes: Any) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-m", *words], **pipes)
        stack.callback(child.wait)
        stack.callback(child.kill)
        return child


def _asked(ask: Callable[[], bytes]) -> dict[str, float]:
    """Return the median time of some calls, with unanswered ones, and an answer's size; fail if there is no answer."""
    times_s: list[float] = []
    sizes: list[int] = []
    refusal: Exception | None = None
    for _ in range(ASKED):
        began_s = time.monotonic()
        try:
            sizes.append(len(ask()))
        except (ParashardError, OSError) as error:
            refusal = error
            sys.stderr.write(f"not answered: {error}\n")
        times_s.append(time.monotonic() - began_s)
    if not sizes:
        raise RuntimeError(f"none of {ASKED} calls was answered") from refusal
    return {"median_s": statistics.median(times_s), "bytes": sizes[-1]}


def _read(url: str) -> bytes:
    with urlopen(url, timeout=START_S) as answer:  # our own port
        return bytes(answer.read())
