"""A coordinator under the real threads of 64 workers: is every step complete once, while workers die?

    PYTHONPATH=.:tests python tests/threads/coordinator_threads.py [--steps 100000] [--seed N]

Each thread is a worker. It leases and reports steps; it repeats reports, fails at steps, and falls silent until its
leases end. Sometimes it dies with the steps that it holds and joins again, under its name or another, or it leaves. One
more thread ticks, another asks for the status. Calls go to the service as gRPC's threads make them, over a core that
notes which thread touches it without its lock (`support/owned_core.py`).
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import Fenced, RetryLater, UnknownWorker
from parashard_coordinator.core.core import Core
from parashard_coordinator.endpoints.service import CoordinatorService
from parashard_coordinator.endpoints.status import StatusView
from support.coordinator_cases import RUN
from support.owned_core import owned_core
from support.served_core import lease_request, worker_request

WORKERS = 64
LEASE_TTL_S = 0.5
SILENT_S = 1.5 * LEASE_TTL_S  # longer than its leases: others get its steps, and it is told so as it returns
HELD_S = 0.1  # a call without work waits so long
TICK_S = 0.02
EXAMPLES = 8
INCARNATIONS = [1, 1]  # of the shards


@dataclass
class Worker:
    """One incarnation of a worker."""

    name: str
    incarnation: int
    sequence: int = 0
    held: list[int] = field(default_factory=list)
    told: list[pb.CompletedStep] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What happened, by name, and every broken promise."""

    counts: collections.Counter[str]
    wrong: list[str]


class CoordinatorUnderThreads:
    """A coordinator of one job, and its workers.

    Parameters
    ----------
    steps : int
        The job's.
    seed : int
        Of what each worker does next.
    """

    def __init__(self, steps: int, seed: int) -> None:
        self._steps, self._seed = steps, seed
        self._core, self._trespasses = owned_core(
            steps_total=steps, workers=WORKERS, lease_ttl_s=LEASE_TTL_S, max_attempts=10**6
        )
        self._service = CoordinatorService(self._core, pb.GetJobReply(run_id=RUN), StatusView("job", "async"))
        self._counts: list[collections.Counter[str]] = []
        self._wrong: list[str] = []
        self._over = threading.Event()

    def run(self, deadline_s: float) -> Outcome:
        """Let the workers finish the job, at most for so long, end them, and judge."""
        with ThreadPoolExecutor(WORKERS + 2) as pool:
            workers = [pool.submit(self._live, number) for number in range(WORKERS)]
            others = [pool.submit(self._tick), pool.submit(self._look)]
            try:
                until_s = time.monotonic() + deadline_s
                while not self._core.run_exclusive(lambda core, _: core.job.complete or core.job.over):
                    if time.monotonic() > until_s:
                        self._wrong.append(f"not complete after {deadline_s:.0f} s")
                        break
                    time.sleep(TICK_S)
            finally:  # else the pool waits for its threads
                self._core.run_exclusive(lambda core, _: core.job.over or core.job.mark_done())
                self._over.set()
            for ended in (*workers, *others):
                ended.result(deadline_s)
        counts = sum(self._counts, collections.Counter[str]())
        self._wrong += self._core.run_exclusive(lambda core, _: self._judged(core, counts))
        return Outcome(counts, self._wrong + self._trespasses[:3])

    def _live(self, number: int) -> None:
        """Be one worker after another, until the job is over."""
        draw, counts = random.Random(f"{self._seed}.{number}"), collections.Counter[str]()
        self._counts.append(counts)
        me = self._joined(f"worker-{number}", counts)
        while True:
            what = draw.random()
            if what < 0.02:
                counts["died"] += 1  # unreported: its leases end by time, or as it joins again
                me = self._joined(draw.choice([me.name, ""]), counts)
            elif what < 0.03 and me.held:
                counts["silent"] += 1
                self._over.wait(SILENT_S)
            try:
                reply = self._service.Lease(self._request(me, draw, counts), None)
                if reply.state == pb.JOB_STATE_DONE:
                    return
                me.held = [step for step in me.held if step not in reply.revoked] + [g.step for g in reply.granted]
                counts["granted"] += len(reply.granted)
                counts["revoked"] += len(reply.revoked)
                if what > 0.99:
                    me.sequence += 1
                    request = lease_request(me.name, me.sequence, incarnation=me.incarnation, leaving=True)
                    self._service.Lease(request, None)
                    counts["left"] += 1
                    me = self._joined(me.name, counts)
            except RetryLater:
                continue
            except (Fenced, UnknownWorker) as error:  # also where it was slow, and another guest has its name
                counts[f"refused: {error.code}"] += 1
                me = self._joined("", counts)

    def _joined(self, name: str, counts: collections.Counter[str]) -> Worker:
        reply = self._service.RegisterWorker(worker_request(name), None)
        counts["joined"] += 1
        return Worker(reply.name, reply.incarnation)

    def _request(self, me: Worker, draw: random.Random, counts: collections.Counter[str]) -> pb.LeaseRequest:
        """Report some of what is held, and perhaps once more what was reported before; ask for more."""
        me.sequence += 1
        done = me.held[: draw.randrange(3)]
        failed = me.held[len(done) : len(done) + (draw.random() < 0.02)]
        me.held = me.held[len(done) + len(failed) :]
        counts["failed"] += len(failed)
        again, me.told = (
            me.told if draw.random() < 0.1 else [],
            [pb.CompletedStep(step=step, incarnations=INCARNATIONS, loss=0.5, examples=EXAMPLES) for step in done],
        )
        counts["told"] += len(me.told)
        counts["told again"] += len(again)
        return lease_request(
            me.name,
            me.sequence,
            incarnation=me.incarnation,
            held=me.held,
            completed=[*again, *me.told],
            failed=[pb.FailedStep(step=step, reason="on purpose") for step in failed],
            want=draw.randrange(5) if me.held else 4,
            wait_s=HELD_S,
        )

    def _tick(self) -> None:
        while not self._over.wait(TICK_S):
            self._core.run_exclusive(lambda core, now_s: core.tick(now_s))

    def _look(self) -> None:
        seen = 0
        while not self._over.wait(TICK_S):
            status = self._service.GetStatus(pb.GetStatusRequest(run_id=RUN), None)
            if status.steps_complete < seen:
                self._wrong.append(f"the status went back from {seen} complete steps to {status.steps_complete}")
            seen = status.steps_complete

    def _judged(self, core: Core, counts: collections.Counter[str]) -> list[str]:
        by_workers = sum(worker.steps_complete for worker in core.job.workers.by_name.values())
        told = {
            "steps complete": len(core.job.leases.complete),
            "steps complete by worker": by_workers,
            "examples / 8": core.job.figures.examples / EXAMPLES,
        }
        counts["completions"] = by_workers
        wrong = [f"{name}: {found}, of {self._steps}" for name, found in told.items() if found != self._steps]
        if core.job.leases.leased:
            wrong.append(f"{core.job.leases.leased} steps are still leased")
        return wrong


def main() -> int:
    """Run a job, print what happened, and return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the job (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="seed (default: a fresh one)")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="deadline of the job (default: %(default)s)")
    arguments = parser.parse_args()
    outcome = CoordinatorUnderThreads(arguments.steps, arguments.seed).run(arguments.deadline_s)
    told = ", ".join(f"{name} {count:,}" for name, count in sorted(outcome.counts.items()))
    verdict = "\n".join(outcome.wrong) or "every promise kept"
    sys.stdout.write(f"{WORKERS} workers, seed {arguments.seed}: {told}\n{verdict}\n")
    return bool(outcome.wrong)


if __name__ == "__main__":
    sys.exit(main())
