"""Race 2: empty steps scheduled per second, against `schedule` and `join` of TensorFlow's coordinator.

    python -m benchmarks.races.scheduling [--peers tensorflow] [--write]

Two workers each. Ours: a coordinator service in one process, and worker processes with the product's own `Leasing`,
which lease each step and report it complete, over gRPC on loopback; every step must be complete at the end. With a
lease batch of 1 every step costs a call of its own, as with the peer; 16 is what a job has by default.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.environments import DEFAULT_FOLDER
from benchmarks.races.contestants import Running, peer
from benchmarks.races.rows import as_json, compared, markdown
from benchmarks.tables import spread, table, write
from benchmarks.training import clean_up_when_ended
from parashard._proto import coordinator_pb2 as pb
from parashard.process.logs import log
from parashard.protocol.coordinator_client import CoordinatorClient
from parashard.protocol.rpc import Server
from parashard_coordinator.core.calls import CoreSettings
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

RUN_ID = "benchmark"
TTL_S = 10.0
DEADLINE_S = 120.0
POLL_S = 0.01
WORKERS = 2
BATCHES = {16: 10, 1: 1}
"""By lease batch, the factor of `--steps` with which all take about as long."""


def measure(workers: int, batch: int, steps: int) -> float:
    """Return empty steps per second, from the first lease to the last completion."""
    options = CoreSettings(RUN_ID, "", steps, shards=0, workers=workers, lease_batch=batch, lease_ttl_s=TTL_S)
    job = JobRecord(options, Async(), Evaluations([], Async(), steps), None, Rounds())
    core = ExclusiveCore(Core(job))
    service = CoordinatorService(core, pb.GetJobReply(run_id=RUN_ID), StatusView("scheduling", "async"))
    server = Server("127.0.0.1:0")
    service.add_to(server)
    server.start()
    command = [sys.executable, "-m", "benchmarks.races.scheduling", "--work-for", server.address, "--batch", str(batch)]
    processes = [subprocess.Popen(command) for _ in range(workers)]
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while (complete := core.run_exclusive(lambda core, _: len(core.job.leases.complete))) < steps:
            assert time.monotonic() < deadline_s, f"only {complete} of {steps} steps are complete"
            time.sleep(POLL_S)
        rate = steps / core.run_exclusive(lambda core, _: core.job.progress.training_s())
        core.run_exclusive(lambda core, _: core.job.mark_done())
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
    """Run the race, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-for", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=16, help=argparse.SUPPRESS)
    parser.add_argument(
        "--environments", type=Path, default=DEFAULT_FOLDER, help="folder of the peers' environments (default: .peers)"
    )
    parser.add_argument(
        "--peers", nargs="*", default=[], choices=["tensorflow", "all"], help="peers to race (default: none)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3000, help="steps of a round (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write race_scheduling.json and .md")
    arguments = parser.parse_args()
    log.setLevel(logging.WARNING)
    if arguments.work_for:
        work(arguments.work_for, arguments.batch)
        return
    clean_up_when_ended()
    ours: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    theirs: dict[str, list[float]] = {}
    versions: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        others = []
        if arguments.peers:
            entry = peer(arguments.environments, "tensorflow", "TensorFlow", "tensorflow_scheduling")
            others.append(stack.enter_context(Running(entry)))
        for _ in range(arguments.rounds):
            for batch, factor in BATCHES.items():
                ours[batch].append(measure(WORKERS, batch, arguments.steps * factor))
            for other in others:
                rate = other.ask({"steps": arguments.steps})["steps_per_s"]
                theirs.setdefault(other.name, []).append(rate)
                versions[other.name] = other.versions
    rows = [
        compared("scheduling", "empty step", (f"lease batch {batch}", _ms(own)), (name, _ms(rates)))
        for name, rates in theirs.items()
        for batch, own in ours.items()
    ]
    rates = {**{f"parashard, lease batch {batch}": own for batch, own in ours.items()}, **theirs}
    lines = [[name, spread([rate / 1000 for rate in own])] for name, own in rates.items()]
    sections = {"Empty steps per second": table(["coordinator", "1,000 steps/s, median (spread)"], lines)}
    if rows:
        sections["Milliseconds per empty step"] = markdown(rows)
    print("\n\n".join(sections.values()), flush=True)
    if arguments.write:
        write("race_scheduling", sections, {"peers": versions, "steps_per_s": rates, "rows": as_json(rows)})


def _ms(rates: list[float]) -> list[float]:
    return [1000 / rate for rate in rates]


if __name__ == "__main__":
    main()
