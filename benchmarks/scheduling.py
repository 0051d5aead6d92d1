"""How many empty steps per second the coordinator leases and hears complete: no shard, no gradient, no data.

A real coordinator service in one process, real worker processes with the product's own `Leasing` beside it, all over
gRPC on loopback. Each step is leased, taken from the worker's queue and reported complete; the run is checked: at its
end every step must be complete. Run it on an idle machine: `python -m benchmarks.scheduling`.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.machine import described
from parashard._proto import coordinator_pb2 as pb
from parashard.process.logs import log
from parashard.protocol.coordinator_client import CoordinatorClient
from parashard.protocol.rpc import Server
from parashard_coordinator.core.calls import Options
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.policies import Async
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.endpoints.service import CoordinatorService
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_worker.leased import Joined, LeaseLimits
from parashard_worker.leasing import Leasing

RESULTS = Path(__file__).parent / "results" / "scheduling.json"
RUN_ID = "benchmark"
TTL_S = 10.0
DEADLINE_S = 120.0


def measure(workers: int, batch: int, steps: int) -> float:
    """Return empty steps per second, from the first lease to the last completion."""
    options = Options(RUN_ID, "", steps, shards=0, workers=workers, lease_batch=batch, lease_ttl_s=TTL_S)
    job = JobRecord(options, Async(), Evaluations([], Async(), steps), None, Rounds())
    core = ExclusiveCore(Core(job))
    service = CoordinatorService(core, pb.GetJobReply(run_id=RUN_ID), StatusView("scheduling", "async"))
    server = Server("127.0.0.1:0")
    service.add_to(server)
    server.start()
    command = [sys.executable, "-m", "benchmarks.scheduling", "--work-for", server.address, "--batch", str(batch)]
    processes = [subprocess.Popen(command) for _ in range(workers)]
    try:
        complete = core.run_until(
            lambda core, _: len(core.job.leases.complete), lambda complete: complete == steps, DEADLINE_S
        )
        assert complete == steps, f"only {complete} of {steps} steps are complete"
        rate = steps / core.run_exclusive(lambda core, _: core.job.progress.training_s())
        core.run_exclusive(lambda core, _: core.job.done())
        for process in processes:
            assert process.wait(timeout=TTL_S) == 0
    finally:
        for process in processes:
            process.kill()
        server.stop(grace_s=0.0)
    return rate


def work(address: str, batch: int) -> None:
    """Take steps and report them complete until the job is over."""
    client = CoordinatorClient(address)

    def join() -> Joined:
        joined = client.register_worker(pb.RegisterWorkerRequest(run_id=RUN_ID))
        return Joined(RUN_ID, joined.name, joined.incarnation, joined.lease_ttl_s)

    leasing = Leasing(client, join(), LeaseLimits(batch, batch // 2, DEADLINE_S, retry_budget_s=TTL_S), join=join)
    leasing.start()
    while not leasing.over:
        grant = leasing.take(0.2)
        if isinstance(grant, pb.Grant):
            leasing.completed(pb.CompletedStep(step=grant.step, examples=1))
    leasing.leave(1.0)


def main() -> None:
    """Measure at the default lease batch and at 1, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-for", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} under benchmarks/results")
    arguments = parser.parse_args()
    log.setLevel(logging.WARNING)
    if arguments.work_for:
        work(arguments.work_for, arguments.batch)
        return
    rows = []
    for batch, steps in ((16, arguments.steps), (1, arguments.steps // 6)):
        rates = [measure(2, batch, steps) for _ in range(arguments.repeats)]
        rows.append({"workers": 2, "lease_batch": batch, "steps": steps, "steps_per_s": [round(r) for r in rates]})
        low, middle, high = min(rates), statistics.median(rates), max(rates)
        print(
            f"2 workers, lease batch {batch:2}: {middle:7,.0f} empty steps/s (from {low:,.0f} to {high:,.0f})",
            flush=True,
        )
    if arguments.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": described(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
