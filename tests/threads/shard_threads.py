"""One shard under real threads: does every step count exactly once in what is served, stored and restored?

    PYTHONPATH=.:tests python tests/threads/shard_threads.py [--seconds 180] [--policy sync:8] [--seed N]

Eight threads push, push again what is in already, push to an earlier life, and pull; the checkpointer's own thread
saves beside them, and with rounds one more returns the shard to earlier ones. The oracle is the ledger: step s adds 1
to one cell, and 1 + s // CELLS beside it, so that no lost step cancels one that is counted twice. No wire is
between: the threads call what each transport calls.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from parashard.client.proto_conversion import plan_message
from parashard.errors import DamagedCheckpoint, NotStored, ParashardError, RetryLater, StaleIncarnation, StaleRequest
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Plan
from parashard.plan.variables import Float32s, Variable
from parashard.protocol.messages import PullRun, PushResult, Target
from parashard.store import open_store
from parashard_server.core.shard import Shard
from support.in_process import plan_of, push_for, variables_of
from support.shard_process import COUNTING, ShardProcess, job_reply
from support.waiting import DEADLINE_S

THREADS = 8
CELLS = 1024
STEPS = 1 << 30
AHEAD = 64  # steps of `async` that are pushed out of order
SAVE_STEPS = 48
RETURN_PAUSE_S = 0.5
AUDIT_PAUSE_S = 0.05
PLAN: Plan = plan_of(variables_of(Variable("ledger", (CELLS, 2))))


@dataclass
class Seen:
    """What the threads saw; each has its own."""

    accepted: list[tuple[int, int]] = field(default_factory=list)  # (incarnation, step)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What happened, by name, and every broken promise."""

    counts: collections.Counter[str]
    wrong: list[str]


class ShardUnderThreads:
    """One shard in a folder, and everything that touches it.

    Parameters
    ----------
    folder : Path
        Its store.
    policy : str
        "async" or "sync:N".
    seed : int
        Of what each thread does next.
    """

    def __init__(self, folder: Path, policy: str, seed: int) -> None:
        self._folder, self._policy, self._seed = folder, policy, seed
        self._round_steps = int(policy.partition(":")[2] or 0)
        self._process = self._started()
        self._lives = [self._process.shard.identity]
        self._over = threading.Event()

    def run(self, seconds: float) -> Outcome:
        """Let the threads work for so long, end them, and judge what is left."""
        self._process.checkpointer.start()
        jobs: list[Callable[[Seen, random.Random], None]] = [self._work] * THREADS
        jobs += [self._audit, self._return] if self._round_steps else [self._audit]
        seen = [Seen() for _ in jobs]
        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [
                pool.submit(self._until_over, job, one, random.Random(f"{self._seed}.{number}"))
                for number, (job, one) in enumerate(zip(jobs, seen, strict=True))
            ]
            self._over.wait(seconds)
            self._over.set()
            for ended in running:
                ended.result(DEADLINE_S)
        self._process.checkpointer.stop()
        counts = sum((one.counts for one in seen), collections.Counter[str]())
        wrong = [text for one in seen for text in one.wrong]
        wrong += self._judged(counts, [pair for one in seen for pair in one.accepted])
        return Outcome(counts, wrong)

    def _started(self) -> ShardProcess:
        checkpoint = {"every_s": 0.0, "every_steps": SAVE_STEPS, "keep": 3}
        reply = job_reply(
            optimizer=COUNTING,
            consistency=self._policy,
            reduce="sum",
            checkpoint=checkpoint,
            queue_bytes=1 << 30,
            plan=plan_message(PLAN),
            steps_total=STEPS,
        )
        return ShardProcess(open_store(str(self._folder)), reply=reply)

    # --- what the threads do ---

    def _until_over(self, job: Callable[[Seen, random.Random], None], seen: Seen, draw: random.Random) -> None:
        try:
            while not self._over.is_set() and not seen.wrong:
                job(seen, draw)
        finally:
            self._over.set()

    def _work(self, seen: Seen, draw: random.Random) -> None:
        """Do one thing that a worker may do, however late."""
        what = draw.random()
        identity, round_, steps = self._process.host.run_exclusive(self._offered)
        if what < 0.15:
            self._pull(seen, identity, round_)
        elif what < 0.25:
            self._push(seen, draw.choice(self._lives), draw.choice(steps))
        elif what < 0.4:
            self._push(seen, identity, max(0, steps[0] - draw.randrange(1, AHEAD)))
        else:
            self._push(seen, identity, draw.choice(steps))

    def _offered(self, shard: Shard) -> tuple[Target, int | None, list[int]]:
        """Return the life that is served, its round, and steps that it lacks: of a full round, those of the next."""
        held = shard.updates.held
        first = held.lowest_missing()
        if not self._round_steps:
            missing = [step for start, stop in held.missing(first, first + AHEAD) for step in range(start, stop)]
            return shard.identity, None, missing
        stop = (first // self._round_steps + 1) * self._round_steps
        missing = [step for start, end in held.missing(first, stop) for step in range(start, end)]
        return shard.identity, shard.updates.round, missing

    def _push(self, seen: Seen, identity: Target, step: int) -> None:
        push = push_for(self._process.shard, step, ledger_of([(step, step + 1)]).ravel(), target=identity)
        try:
            ack = self._process.plane.push(push, DEADLINE_S)
        except StaleRequest as error:
            seen.counts[f"refused: {error.code}"] += 1
        except RetryLater as error:
            seen.counts[f"not taken: {error.code}"] += 1
        else:
            seen.counts[ack.result.name.lower()] += 1
            if ack.result is not PushResult.DUPLICATE:
                seen.accepted.append((identity.incarnation, step))

    def _pull(self, seen: Seen, identity: Target, round_: int | None) -> None:
        def read(weights: object) -> None:
            shard = self._process.shard
            told = of_weights(shard.storage.weights, shard.updates.applied)
            seen.wrong.extend(f"a pull: {text}" for text in told)

        run = PullRun(identity, round_, None, 0, self._process.shard.storage.weights.nbytes)
        try:
            self._process.plane.pull(run, DEADLINE_S, read)
        except StaleRequest as error:
            seen.counts[f"pull refused: {error.code}"] += 1
        else:
            seen.counts["pulled"] += 1

    def _audit(self, seen: Seen, draw: random.Random) -> None:
        """Read a checkpoint as a restore does, while others are written and deleted."""
        self._over.wait(AUDIT_PAUSE_S)
        ids = self._process.catalogue.checkpoints()
        if not ids:
            return
        id_ = draw.choice(ids)
        try:
            state = self._process.state_in(id_)
        except NotStored:
            seen.counts["checkpoint collected meanwhile"] += 1
            return
        except DamagedCheckpoint:
            if id_ in self._process.catalogue.checkpoints():
                raise
            seen.counts["checkpoint collected while it was read"] += 1
            return
        seen.counts["checkpoint audited"] += 1
        weights = np.concatenate([array.ravel() for array in state.variables.values()])
        seen.wrong.extend(f"checkpoint {id_}: {text}" for text in of_weights(weights, state.applied, each_cell=True))

    def _return(self, seen: Seen, draw: random.Random) -> None:
        """Replace the shard by one of its newest rounds."""
        self._over.wait(draw.uniform(0, 2 * RETURN_PAUSE_S))
        identity = self._process.shard.identity
        round_ = draw.choice(self._process.lifecycle.returnable()[-2:])
        try:
            self._process.lifecycle.roll_back(round_, identity.incarnation)
        except (StaleIncarnation, RetryLater) as error:
            seen.counts[f"not returned: {error.code}"] += 1
        except ParashardError as error:
            seen.wrong.append(f"round {round_} cannot be returned to: {error}")
        else:
            seen.counts["returned to a round"] += 1
            self._lives.append(self._process.shard.identity)

    # --- the verdict ---

    def _judged(self, counts: collections.Counter[str], accepted: list[tuple[int, int]]) -> list[str]:
        shard, record = self._process.shard, self._process.shard.record
        wrong = of_weights(shard.storage.weights, shard.updates.applied, each_cell=True)
        twice = [pair for pair, times in collections.Counter(accepted).items() if times > 1]
        wrong += [f"life {life} accepted step {step} more than once" for life, step in twice[:5]]
        mine = {step for life, step in accepted if life == shard.identity.incarnation}
        lost = [step for step in mine if not shard.updates.holds(step)]
        wrong += [f"step {step} was acknowledged and is not held" for step in sorted(lost)[:5]]
        told = {
            "duplicate pushes": (record.duplicate_pushes, counts["duplicate"]),
            "pushes accepted": (record.applied_pushes + record.buffered_pushes, len(accepted)),
            "pushes refused": (
                record.refused_pushes,
                sum(counts[name] for name in counts if name.startswith("refused")),
            ),
        }
        wrong += [
            f"{name}: the shard counts {own}, its callers {seen}" for name, (own, seen) in told.items() if own != seen
        ]
        again = self._started()
        restored = of_weights(again.shard.storage.weights, again.shard.updates.applied, each_cell=True)
        counts["steps in the weights"] = len(shard.updates.applied)
        counts["steps restored"] = len(again.shard.updates.applied)
        counts["checkpoints"] = self._process.checkpointer.record.stored
        return wrong + [f"restored: {text}" for text in restored]


def ledger_of(applied: Iterable[tuple[int, int]]) -> Float32s:
    """Return what the weights must be, cell by cell."""
    ledger = np.zeros((CELLS, 2))
    for start, stop in applied:
        steps = np.arange(start, stop)
        np.add.at(ledger, (steps % CELLS, 0), 1)
        np.add.at(ledger, (steps % CELLS, 1), 1 + steps // CELLS)
    return ledger.astype(np.float32)


def of_weights(weights: Float32s, applied: IntervalSet, *, each_cell: bool = False) -> list[str]:
    """Compare weights with what the applied steps add up to: their totals, or each cell."""
    found = weights.reshape(CELLS, 2)
    if each_cell:
        bad = np.argwhere(found != ledger_of(applied.intervals()))
        return [f"{len(bad)} cells are wrong, first {bad[0].tolist()}"] if len(bad) else []
    sums = found.sum(axis=0, dtype=float).tolist()
    due = [len(applied), sum(_total(stop) - _total(start) for start, stop in applied.intervals())]
    return [] if sums == due else [f"the weights add up to {sums}, the applied steps to {due}"]


def _total(stop: int) -> int:
    """Return what the steps before one add to the second column."""
    laps, rest = divmod(stop, CELLS)
    return stop + CELLS * laps * (laps - 1) // 2 + laps * rest


def main() -> int:
    """Run for some time, print what happened, and return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="duration (default: %(default)s)")
    parser.add_argument("--policy", default="sync:8", help="async or sync:N (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="seed (default: a fresh one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = ShardUnderThreads(Path(folder), arguments.policy, arguments.seed).run(arguments.seconds)
    told = ", ".join(f"{name} {count:,}" for name, count in sorted(outcome.counts.items()))
    verdict = "\n".join(outcome.wrong) or "every promise kept"
    sys.stdout.write(f"{arguments.policy}, seed {arguments.seed}, {arguments.seconds:g} s: {told}\n{verdict}\n")
    return bool(outcome.wrong)


if __name__ == "__main__":
    sys.exit(main())
