"""A crowd of workers in one process: the product's own decisions (`LeasedWork`) and gRPC calls, a connection each.

A step is a pause: nothing is pulled, computed or pushed. A crowd reads one JSON command a line and answers each with
one: `python -m benchmarks.scheduling.crowd ADDRESS FIRST COUNT`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import coordinator_pb2_grpc
from parashard.errors import ParashardError
from parashard.protocol import rpc
from parashard_worker.leased import Joined, LeasedWork, LeaseLimits

SHARDS = 64
FOREVER_S = 1e9
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]
PHASES_S = {"lease": 0.0, "pull": 0.0, "compute": 0.0, "push": 0.0, "transfer": 0.0}


def ours(error: grpc.aio.AioRpcError) -> ParashardError:
    """Return the error that a failed call stands for."""
    code = dict(error.trailing_metadata() or ()).get(rpc.CODE_KEY)
    kind = (ParashardError.from_code(code) if isinstance(code, str) else None) or rpc.ERROR_BY_FOREIGN_STATUS[
        error.code()
    ]
    return kind(error.details() or "")


class Crowd:
    """Workers `first` to `first + count - 1` of a job."""

    def __init__(self, address: str, first: int, count: int) -> None:
        self._channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(count)]
        self._stubs = [coordinator_pb2_grpc.CoordinatorStub(channel) for channel in self._channels]  # type: ignore[no-untyped-call]
        self._names = [f"worker-{first + i}" for i in range(count)]
        self._works: list[LeasedWork] = []
        self._counts: Counter[str] = Counter()
        self._latencies_s: list[float] = []
        self._joined: list[Joined] = []
        self._deadline_s = 1.0
        self._last_report_s = 0.0

    async def ready(self) -> dict[str, Any]:
        """Report that this process is up."""
        return self._told()

    async def join(self) -> dict[str, Any]:
        """Ask for the job, the view and membership, as a worker does at its start."""
        await asyncio.gather(*map(self._join, self._stubs, self._names))
        return self._told()

    async def work(self, step_s: float, batch: int, seconds: float, *, apart: bool = False) -> dict[str, Any]:
        """Lease, hold each step for `step_s`, report it, and ask for more, for `seconds`.

        `apart`: the workers begin evenly spread over the time of a step, as those of a job are after a while.
        """
        until_s = time.monotonic() + seconds
        if not self._works:
            limits = LeaseLimits(batch, 0, FOREVER_S)
            self._works = [LeasedWork(joined, limits, time.monotonic(), evaluates=False) for joined in self._joined]
        for work in self._works:
            work._limits = LeaseLimits(batch, 0, FOREVER_S)  # of the phase, as if the job file had this lease_batch
            work._step_s = step_s  # else a worker would ask for a number of steps that suits the phase before
        members = enumerate(zip(self._stubs, self._works, strict=True))
        apart_s = step_s / len(self._works) if apart else 0.0
        await asyncio.gather(*(self._live(s, w, step_s, until_s, i * apart_s) for i, (s, w) in members))
        return self._told()

    async def leave(self) -> dict[str, Any]:
        """Give all steps back and leave."""
        for work in self._works:
            work.leave()
        await asyncio.gather(*(self._call(s, w) for s, w in zip(self._stubs, self._works, strict=True)))
        return self._told()

    def _told(self) -> dict[str, Any]:
        latencies_s = [round(s, 6) for s in self._latencies_s]
        told = {"counts": dict(self._counts), "latencies_s": latencies_s, "last_report_s": self._last_report_s}
        self._counts.clear()
        self._latencies_s = []
        return told

    async def _join(self, stub: coordinator_pb2_grpc.CoordinatorStub, name: str) -> None:
        job = await self._patiently(lambda: stub.GetJob(pb.GetJobRequest(), timeout=10.0))
        request = pb.RegisterWorkerRequest(
            run_id=job.run_id,
            job_digest=job.job_digest,
            name=name,
            device="cpu",
            fingerprint="one",
            token=hash(name) & 0xFFFFFFFF | 1,
        )
        member = await self._patiently(lambda: stub.RegisterWorker(request, timeout=10.0))
        await self._patiently(lambda: stub.GetView(pb.GetViewRequest(run_id=job.run_id), timeout=10.0))
        self._deadline_s = max(1.0, member.lease_ttl_s / 3)  # as a worker has it
        self._joined.append(Joined(job.run_id, member.name, member.incarnation, member.lease_ttl_s))
        self._counts["joined"] += 1

    async def _patiently(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                self._counts[f"refused: {ours(error).code}"] += 1
                await asyncio.sleep(0.1)

    async def _live(
        self,
        stub: coordinator_pb2_grpc.CoordinatorStub,
        work: LeasedWork,
        step_s: float,
        until_s: float,
        offset_s: float,
    ) -> None:
        """Run one worker; a step still being computed at the end is given back, since it is no longer listed."""
        await asyncio.sleep(offset_s)
        step: pb.Grant | None = None
        ends_s = 0.0
        while (now_s := time.monotonic()) < until_s:
            if step is not None and now_s >= ends_s:
                done = pb.CompletedStep(step=step.step, incarnations=[1] * SHARDS, loss=0.5, examples=1)
                work.completed(done, now_s)
                self._counts["computed"] += 1
                step = None
            if step is None:
                taken = work.take(now_s)
                if isinstance(taken, pb.Grant):
                    step, ends_s = taken, now_s + step_s
                    continue
            due_s = work.due_in_s(now_s)
            if due_s > 0:
                wait_s = due_s if step is None else min(due_s, ends_s - now_s)
                await asyncio.sleep(max(0.0, min(wait_s, until_s - now_s)))
            else:
                await self._call(stub, work)
        if step is not None:
            work.dropped(step.step, time.monotonic())

    async def _call(self, stub: coordinator_pb2_grpc.CoordinatorStub, work: LeasedWork) -> None:
        began_s = time.monotonic()
        request = work.request(began_s, PHASES_S)
        assert request is not None, work.failure or work.reason
        self._counts["calls"] += 1
        try:
            reply = await stub.Lease(request, timeout=self._deadline_s + request.wait_s)
        except grpc.aio.AioRpcError as error:
            self._counts[f"refused: {ours(error).code}"] += 1
            work.lost(ours(error), time.monotonic())
            return
        now_s = time.monotonic()
        work.accept(request, reply, now_s)
        self._counts["granted"] += len(reply.granted)
        self._counts["steps"] += len(request.completed)
        if request.completed:
            self._last_report_s = now_s
        if reply.granted:
            self._latencies_s.append(now_s - began_s)


async def main() -> None:
    """Run the command of each line until the input ends."""
    crowd = Crowd(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        told = await getattr(crowd, command.pop("do"))(**command)
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
