"""Count the functions of ours that one push and one pull pass through, over each transport.

    python -m benchmarks.frames [--transports shm tcp grpc] [--write]

The worker's half is real `Transfers`, which a step loop calls; the shard is a real one in this process, with its ports
and threads; a coordinator runs beside it. A profiler of each thread notes every call of a function of ours. Two things
are counted:

- the way: the frames that a debugger shows, from `Transfers` to where the request leaves Python, and from the thread of
  a connection to the kernel that moves the weights (of a pull: to where its weights are read);
- all: every function that is called at least once, also those that only look after deadlines, locks and counters.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.races.ballast import COLUMNS
from benchmarks.races.ours import JOB
from benchmarks.tables import table, write
from parashard._proto import coordinator_pb2 as pb
from parashard.client.proto_conversion import plan_from, view_from
from parashard.client.shard_client import ShardClient
from parashard.job.layers import parse_set
from parashard.job.load import as_toml, load_job
from parashard.launch.local_cluster import MODULES, LocalCluster
from parashard.process.logs import log
from parashard.process.shell import Stop
from parashard.process.starts import ShardStart
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.transports.choosing import connect_by
from parashard_server.__main__ import serve
from parashard_worker.transfers import Transfers

ROOT = Path(__file__).parents[1]
OURS = tuple(str(ROOT / folder) + "/" for folder in ("parashard", "ps_server", "worker"))
GENERATED = str(ROOT / "parashard" / "_proto") + "/"
KERNELS = "/state/kernels/"
READS = {"changed_runs"}  # Storage.changed_runs returns the answer to a pull
LEAVES = {"sendmsg", "send"}
CALLS = {"future", "__call__"}
"""Where a request leaves our Python: a system call, or a method of gRPC's."""
BESIDE = ("shard", "checkpoints")
"""Threads of the shard that serve no request."""
PARTS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
"""Comprehensions, which belong to the function around them."""
ELEMENTS = 4 << 20  # 16 MiB, so that transfers come in pieces
WARM_STEPS = 2  # later ones find connections and buffers
STEPS = 4  # the one with the fewest functions counts: gRPC sometimes does work that belongs to no call
WAITS = "poll"
"""Called by the shard's thread of a connection once a request is over."""
WAIT_S = 10.0


class Seen(NamedTuple):
    """Functions that were called in an operation, and the deepest way, by side."""

    called: dict[str, set[CodeType]]
    way: dict[str, list[CodeType]]


class Calls:
    """Calls of our functions, recorded by a profiler while it is active."""

    def __init__(self) -> None:
        self.looking = False
        self.worker = threading.get_ident()
        self._waits = threading.Event()

    @contextmanager
    def seen(self, *, until_waits: bool) -> Iterator[Seen]:
        """Yield the calls made in the block; with `until_waits`, record until the shard waits for a request."""
        self._waits.clear()
        self._seen, self.looking = Seen({"worker": set(), "shard": set()}, {"worker": [], "shard": []}), True
        try:
            yield self._seen
            if until_waits and not self._waits.wait(WAIT_S):
                raise RuntimeError(f"the shard did not wait for another request within {WAIT_S:g} s")
        finally:
            self.looking = False

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call; a callback for `sys.setprofile`."""
        if not self.looking or threading.current_thread().name in BESIDE:
            return
        side = "worker" if threading.get_ident() == self.worker else "shard"
        code = frame.f_code
        if event == "call" and _is_ours(code):
            self._seen.called[side].add(code)
            if side == "shard" and (_enters_kernel(frame) or code.co_name in READS):
                self._note(side, frame)
        elif side == "shard" and event == "c_call" and _is_ours(code) and argument.__name__ == WAITS:
            self._waits.set()
        elif side == "worker" and (
            (event == "c_call" and getattr(argument, "__name__", "") in LEAVES)
            or (event == "call" and code.co_name in CALLS and "/grpc/" in code.co_filename)
        ):
            self._note(side, frame)

    def _note(self, side: str, frame: FrameType | None) -> None:
        """Keep the deepest way."""
        found = []
        while frame is not None:
            if _is_ours(frame.f_code):
                found.append(frame.f_code)
            frame = frame.f_back
        if len(found) > len(self._seen.way[side]):
            self._seen.way[side] = found[::-1]


def _is_ours(code: CodeType) -> bool:
    """Tell whether a function is ours."""
    name = code.co_filename
    return name.startswith(OURS) and not name.startswith(GENERATED) and code.co_name not in PARTS


def _enters_kernel(frame: FrameType) -> bool:
    caller = frame.f_back
    return KERNELS in frame.f_code.co_filename and caller is not None and KERNELS not in caller.f_code.co_filename


@contextmanager
def cluster(transport: str) -> Iterator[ShardClient]:
    """Start a coordinator, and a shard in this process; yield a client."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [
            f"model.elements={ELEMENTS}",
            "data.examples=1000000",
            'cluster.launcher="external"',
            f'cluster.transport="{transport}"',
        ]
        job = load_job(JOB, [parse_set(setting) for setting in settings], {}).job
        (folder / "job.toml").write_text(as_toml(job))
        processes, stop = LocalCluster(folder), Stop()
        arguments = ["--job", str(folder / "job.toml"), "--run-dir", name, "--model-folder", str(JOB.parent)]
        processes.start("coordinator", MODULES["coordinator"], arguments)
        coordinator = CoordinatorClient(find_coordinator(name), where=name)
        reply = coordinator.get_job()
        shard = threading.Thread(target=serve, args=(ShardStart(connect=name, index=0), stop, None), name="shard")
        shard.start()
        plan, connect = plan_from(reply.plan), connect_by(job.cluster.transport)
        client = ShardClient(reply.run_id, reply.job_digest, plan, "worker-0", connect=connect)
        try:
            client.use(coordinator.retry(lambda: view_from(coordinator.get_view(reply.run_id))))
            yield client
        finally:
            client.close()
            stop.ask("measured")
            shard.join()
            coordinator.close()
            processes.end()


def counted(transport: str, calls: Calls) -> tuple[list[list[str]], str]:
    """Return a row of the table for a push and a pull, and the ways as text."""
    gradient = {"ballast": np.ones((ELEMENTS // COLUMNS, COLUMNS), np.float32)}
    rows, ways = [], []
    with cluster(transport) as client:
        leasing: Any = SimpleNamespace(view=0, ahead=0)
        transfers = Transfers(client, leasing, None)
        found: dict[str, list[Seen]] = {"push": [], "pull": []}
        until_waits = transport != "grpc"  # whose threads are gRPC's
        for step in range(WARM_STEPS + STEPS):
            with calls.seen(until_waits=until_waits) as pull:
                pulled = transfers.pull(pb.Grant(step=step))
            with calls.seen(until_waits=until_waits) as push:
                transfers.push(pb.Grant(step=step), gradient, pulled)
            if pulled is not None:
                pulled.release()
            if step >= WARM_STEPS:
                found["push"].append(push)
                found["pull"].append(pull)
        for operation, steps in found.items():
            called, way = min(steps, key=lambda seen: sum(map(len, seen.called.values())))
            files = {code.co_filename for side in way.values() for code in side}
            every = called["worker"] | called["shard"]
            rows.append(
                [
                    transport,
                    operation,
                    str(len(way["worker"])),
                    str(len(way["shard"])),
                    str(len(way["worker"]) + len(way["shard"])),
                    str(len(files)),
                    str(len(every)),
                    str(len({code.co_filename for code in every})),
                ]
            )
            for side in ("worker", "shard"):
                ways.append(f"{transport} {operation}, {side}:")
                ways += [f"  {_named(code)}" for code in way[side]]
    return rows, "\n".join(ways)


def _named(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(ROOT)}: {code.co_qualname}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and the ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp", "grpc"], choices=["shm", "tcp", "grpc"])
    parser.add_argument("--write", action="store_true", help="write frames.json and .md in benchmarks/results")
    arguments = parser.parse_args(argv)
    log.setLevel(logging.WARNING)
    calls = Calls()
    threading.setprofile(calls.profile)  # of threads that begin from now on: all of the shard's
    sys.setprofile(calls.profile)
    rows, ways = [], []
    for transport in arguments.transports:
        found, way = counted(transport, calls)
        rows += found
        ways.append(way)
    sys.setprofile(None)
    heads = ["transport", "operation", "way, worker", "way, shard", "way", "its files", "all functions", "all files"]
    counts, all_ways = table(heads, rows), "```\n" + "\n\n".join(ways) + "\n```"
    sys.stdout.write(f"{counts}\n\n{all_ways}\n")
    if arguments.write:
        figures = [dict(zip(heads, row, strict=True)) for row in rows]
        write("frames", {"Functions of ours, 16 MiB, one shard, SGD": counts, "The ways": all_ways}, {"rows": figures})


if __name__ == "__main__":
    main()
