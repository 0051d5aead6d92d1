"""How long a shard's process takes until it serves, from a warm cache: `python -m benchmarks.shard_start`.

A real `python -m parashard_server` on a job with Adam and one variable of 1 MiB; its coordinator is the two calls that
a start makes, in this process. Imports and the loading of kernels are timed in processes of their own, taking turns
with the whole, so that what they leave of it is the rest: connecting, claiming an incarnation, listening, registering.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.tables import load_before, spread, table, write
from parashard._proto import coordinator_pb2 as pb
from parashard._proto import coordinator_pb2_grpc
from parashard.client.proto_conversion import plan_message
from parashard.job.load import as_toml, job_from_toml
from parashard.plan.partition import place, split, whole
from parashard.plan.variables import Variable
from parashard.protocol.rpc import Server
from parashard.store import open_store
from parashard_coordinator.run.store import RunIdentity, RunStore

DEADLINE_S = 60.0
DIGEST = "0" * 64
JOB = """
    job = {name = "start", epochs = 1, batch_size = 1}
    data = {source = "digits"}
    model = {kind = "ledger"}
    optimizer = {kind = "adam"}
    cluster = {shards = 1}
"""
STAGES = """
import time
begin_s = time.perf_counter()
import parashard_server.__main__
imported_s = time.perf_counter()
from parashard.plan.optimizers import Adam
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer
fused.warm_up(rounds=False)
Optimizer(Adam()).warm_up()
print(imported_s - begin_s, time.perf_counter() - imported_s)
"""


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """The part of a coordinator that a starting shard calls."""

    def __init__(self, checkpoint_url: str) -> None:
        variables = {"w": Variable("w", (512, 512))}
        plan = place(variables, split(variables, whole), 1, version=1)
        self._job = pb.GetJobReply(
            run_id="start",
            job_digest=DIGEST,
            job_toml=as_toml(job_from_toml(JOB)),
            plan=plan_message(plan),
            steps_total=1,
            checkpoint_url=checkpoint_url,
        )

    def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobReply:
        """Give the job."""
        return self._job

    def RegisterShard(self, request: pb.RegisterShardRequest, context: Any) -> pb.RegisterShardReply:
        """Take the shard in."""
        return pb.RegisterShardReply(coordinator_incarnation=1)


def measure_whole() -> tuple[float, float, float]:
    """Return the seconds from starting a shard's process until it reports to serve, its CPU seconds, and its MiB."""
    with tempfile.TemporaryDirectory() as folder:
        url = Path(folder).as_uri()
        RunStore(open_store(url), 1).begin_run("start", RunIdentity(DIGEST, {}, JOB))
        server, coordinator = Server("127.0.0.1:0"), Coordinator(url)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(coordinator, server.grpc)  # type: ignore[no-untyped-call]
        server.start()
        command = [sys.executable, "-m", "parashard_server", "--connect", server.address, "--index", "0"]
        begin_s = time.perf_counter()
        shard = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert shard.stderr is not None
            said = []
            for line in shard.stderr:
                said.append(line)
                if "event=serving" in line:
                    return time.perf_counter() - begin_s, *used_by(shard.pid)
            raise AssertionError("the shard ended before it served:\n" + "".join(said))
        finally:
            shard.kill()
            shard.wait()
            server.stop(grace_s=0.0)


def used_by(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process that runs, and its resident MiB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, pages = (int(fields[at]) for at in (11, 12, 21))  # of proc(5), from its third field
    return (user + system) / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure_stages() -> tuple[float, float]:
    """Return the seconds of a shard's imports, and of loading its kernels after them."""
    command = [sys.executable, "-c", STAGES]
    said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    imports_s, kernels_s = map(float, said.split())
    return imports_s, kernels_s


def measure_interpreter() -> float:
    """Return the seconds of a Python process that does nothing."""
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""], timeout=DEADLINE_S, check=True)
    return time.perf_counter() - begin_s


def main() -> None:
    """Measure in turns, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="write shard_start.json and shard_start.md")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    measure_whole()  # fills the cache
    times: dict[str, list[float]] = {"interpreter": [], "imports": [], "kernels": [], "rest": [], "whole": []}
    used: dict[str, list[float]] = {"CPU, s": [], "resident, MiB": []}
    for _ in range(arguments.turns):
        imports_s, kernels_s = measure_stages()
        parts = {"interpreter": measure_interpreter(), "imports": imports_s, "kernels": kernels_s}
        whole_s, cpu_s, resident_mib = measure_whole()
        used["CPU, s"].append(cpu_s)
        used["resident, MiB"].append(resident_mib)
        for name, found_s in (parts | {"rest": whole_s - sum(parts.values()), "whole": whole_s}).items():
            times[name].append(found_s)
    text = table(("part", "seconds: median (least to most)"), [(name, spread(found)) for name, found in times.items()])
    rows = [(name, spread(found)) for name, found in used.items()]
    text += "\n\n" + table(("of the whole", "median (least to most)"), rows)
    print(text)
    if arguments.write:
        sections = {"Load": load_before(load), "A shard's start from a warm cache": text}
        write("shard_start", sections, {"load": load, "seconds": times, "used": used})


if __name__ == "__main__":
    main()
