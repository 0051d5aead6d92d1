"""The time from the death of a shard, a worker or the coordinator until its work goes on, and its parts.

Kills one process at a time with SIGKILL, waits until the job is steady again, and kills the next. Everything is seen
from outside: the launcher's records, the processes' logs, and the answers of coordinator and shards, asked every 5 ms.
Called by `benchmarks.recovery`.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time

from benchmarks.tables import median_and_worst, table
from benchmarks.watched_run import Watch
from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.errors import JobFailed
from parashard.launch.local_cluster import MODULES

STEADY_STEPS = 20
TRIES = 5
PLATEAU_S = 0.05
IMPORT_RUNS = 5

Since = dict[str, float]
"""Seconds since a death by event, in order; the last is the whole."""


def measured(watch: Watch, deaths: int, seed: int) -> dict[str, list[Since]]:
    """Kill each role `deaths` times, in turns, at random moments; return the times by role."""
    rng = random.Random(seed)
    seen: dict[str, list[Since]] = {role: [] for role in MODULES}
    for turn in range(deaths):
        for role, die in (("shard", shard_dies), ("worker", worker_dies), ("coordinator", coordinator_dies)):
            for _ in range(TRIES):
                status = steady(watch)
                watch.pause(rng.uniform(0.2, 1.2))
                index = turn % {"shard": len(status.shards), "worker": len(status.workers)}.get(role, 1)
                since = die(watch, index)
                if since is not None:
                    seen[role].append(since)
                    print(f"{role} {turn + 1} of {deaths}: {told(since)}", flush=True)
                    break
                print(f"{role} {turn + 1} of {deaths}: again, for its workers were still busy", flush=True)
            else:
                raise JobFailed(f"{TRIES} deaths of a {role}, and none could be measured")
    return seen


def steady(watch: Watch, steps: int = STEADY_STEPS) -> pb.GetStatusReply:
    """Wait until every shard is in and every worker has completed some steps from now on; return the status."""
    first = watch.eventually(watch.status, "a coordinator that answers")
    before = {worker.name: worker.steps_complete for worker in first.workers}

    def look() -> pb.GetStatusReply | None:
        status = watch.status()
        if status is None or status.state != pb.JOB_STATE_RUNNING or len(status.workers) < status.workers_wanted:
            return None
        grown = all(w.live and w.steps_complete >= before.get(w.name, 0) + steps for w in status.workers)
        return status if grown and all(shard.registered for shard in status.shards) else None

    return watch.eventually(look, "a job in which every process works")


def shard_dies(watch: Watch, index: int) -> Since:
    """Kill a shard; the end is the first push that its next incarnation applies."""
    view = watch.eventually(watch.view, "where the shards are")
    old, name = view.shards[index].incarnation, f"shard-{index}"
    killed_s = watch.kill(name)

    def registered() -> pb.ShardAddress | None:
        now = watch.view()
        return now.shards[index] if now is not None and now.shards[index].incarnation > old else None

    address = watch.eventually(registered, f"{name}'s next incarnation").address
    registered_s = time.monotonic()

    def applied() -> bool:
        record = watch.inspect(address)
        return record is not None and pushes_applied(record) > 0

    watch.eventually(applied, f"a push that {name} applied")
    applied_s = time.monotonic()
    return {
        **_started(watch, name, killed_s),
        "restored": watch.told_s(name, "restored", killed_s) - killed_s,
        "registered": registered_s - killed_s,
        "first push applied": applied_s - killed_s,
    }


def worker_dies(watch: Watch, index: int) -> Since:
    """Kill a worker; the end is the first step that its next incarnation reports complete."""
    name = f"worker-{index}"

    def member() -> pb.WorkerStatus | None:
        status = watch.status()
        return None if status is None else next((w for w in status.workers if w.name == name), None)

    old = watch.eventually(member, f"{name} in the job").incarnation
    killed_s = watch.kill(name)

    def joined() -> pb.WorkerStatus | None:
        now = member()
        return now if now is not None and now.incarnation > old else None

    complete = watch.eventually(joined, f"{name}'s next incarnation").steps_complete
    joined_s = time.monotonic()

    def completed() -> bool:
        now = member()
        return now is not None and now.steps_complete > complete

    watch.eventually(completed, f"a step that {name} completed")
    completed_s = time.monotonic()
    return {
        **_started(watch, name, killed_s),
        "joined": joined_s - killed_s,
        "first step completed": completed_s - killed_s,
    }


def coordinator_dies(watch: Watch, _: int) -> Since | None:
    """Kill the coordinator; the end is the first lease of its next incarnation.

    Workers go on with the steps that they hold. These are used up first, so that a lease seen later is a new one; None
    if the next incarnation came before that.
    """
    shards = watch.eventually(watch.view, "where the shards are").shards
    killed_s = watch.kill("coordinator")
    if not used_up(watch, [shard.address for shard in shards]):
        return None
    watch.eventually(watch.status, "the coordinator's next incarnation")
    serving_s = time.monotonic()

    def running() -> bool:
        return watch.view() is not None

    watch.eventually(running, "all shards registered with the next coordinator")
    registered_s = time.monotonic()

    def leased() -> bool:
        now = watch.status()
        return now is not None and now.steps_leased > 0

    watch.eventually(leased, "a lease of the next coordinator")
    leased_s = time.monotonic()
    return {
        **_started(watch, "coordinator", killed_s),
        "answering": serving_s - killed_s,
        "all shards registered": registered_s - killed_s,
        "first lease granted": leased_s - killed_s,
    }


def used_up(watch: Watch, addresses: list[str]) -> bool:
    """Wait until the shards have applied nothing for a while; return False if there is a coordinator by then."""

    def applied() -> list[int]:
        records = [watch.inspect(address) for address in addresses]
        return [pushes_applied(record) for record in records if record is not None]

    before, now = [-1], applied()
    while now != before:
        watch.pause(PLATEAU_S)
        before, now = now, applied()
        if watch.status() is not None:
            return False
    return True


def pushes_applied(record: shard_pb2.InspectReply) -> int:
    """Return how many pushes a shard's current process has applied, without those that it restored."""
    return sum(count.pushes for count in record.staleness) + int(record.unknown_staleness)


def imports_s() -> dict[str, float]:
    """Return by role how long Python and the imports alone take: the median of some starts that end at once."""
    taken: dict[str, list[float]] = {role: [] for role in MODULES}
    for _ in range(IMPORT_RUNS):
        for role, module in MODULES.items():
            began_s = time.monotonic()
            subprocess.run([sys.executable, "-m", module, "--help"], stdout=subprocess.DEVNULL, check=True)
            taken[role].append(time.monotonic() - began_s)
    return {role: statistics.median(times) for role, times in taken.items()}


def sections(seen: dict[str, list[Since]], imports: dict[str, float]) -> dict[str, str]:
    """Return a Markdown table of event times for each role."""
    found = {}
    for role, deaths in seen.items():
        rows = [[what, *median_and_worst([since[what] for since in deaths])] for what in deaths[0]]
        text = table([f"after the death of a {role}, of {len(deaths)}", "median", "worst"], rows)
        found[f"Death of a {role}"] = f"{text}\n\nPython's start and imports alone: {imports[role]:.2f} s."
    return found


def told(since: Since) -> str:
    """Return the times of events, in one line."""
    return ", ".join(f"{what} {seconds:.3f}" for what, seconds in since.items())


def _started(watch: Watch, name: str, killed_s: float) -> Since:
    cluster = watch.cluster
    return {"noticed": cluster.reaped_s[name] - killed_s, "started again": cluster.started_s[name] - killed_s}
