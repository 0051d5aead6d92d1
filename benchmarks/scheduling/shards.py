"""Stand-ins for shards, in one process: each has a port, answers `Inspect` and announces itself once a second.

They report as many applied steps as are complete. `python -m benchmarks.scheduling.shards ADDRESS COUNT`
ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

import grpc.aio

from benchmarks.scheduling.crowd import OPTIONS
from parashard._proto import coordinator_pb2 as pb
from parashard._proto import coordinator_pb2_grpc, shard_pb2, shard_pb2_grpc

ANNOUNCE_S = 1.0


class StandIn(shard_pb2_grpc.ShardServicer):
    """One shard."""

    def __init__(self, shard: int, address: str) -> None:
        self._shard = shard
        self._stub = coordinator_pb2_grpc.CoordinatorStub(grpc.aio.insecure_channel(address, options=OPTIONS))  # type: ignore[no-untyped-call]
        self._server = grpc.aio.server()
        shard_pb2_grpc.add_ShardServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self.complete = 0

    async def Inspect(self, request: shard_pb2.InspectRequest, context: object) -> shard_pb2.InspectReply:
        """Return its record."""
        applied = [shard_pb2.Interval(start=0, stop=self.complete)] if self.complete else []
        staleness = [shard_pb2.StalenessCount(staleness=i, pushes=self.complete // 16) for i in range(16)]
        return shard_pb2.InspectReply(shard=self._shard, incarnation=1, applied=applied, staleness=staleness)

    async def live(self, job: pb.GetJobReply, offset_s: float) -> None:
        """Serve, and announce itself for ever."""
        await self._server.start()
        await asyncio.sleep(offset_s)
        while True:
            applied = [shard_pb2.Interval(start=0, stop=self.complete)] if self.complete else []
            request = pb.RegisterShardRequest(
                run_id=job.run_id,
                job_digest=job.job_digest,
                shard=self._shard,
                incarnation=1,
                address=f"127.0.0.1:{self._port}",
                applied=applied,
                held=applied,
            )
            try:
                await self._stub.RegisterShard(request, timeout=10.0)
            except grpc.aio.AioRpcError as error:
                sys.stderr.write(f"shard-{self._shard}: {error.details()}\n")
            await asyncio.sleep(ANNOUNCE_S)


async def main() -> None:
    """Run all of them until standard input ends."""
    address, count = sys.argv[1], int(sys.argv[2])
    stub = coordinator_pb2_grpc.CoordinatorStub(grpc.aio.insecure_channel(address, options=OPTIONS))  # type: ignore[no-untyped-call]
    job = await stub.GetJob(pb.GetJobRequest(), timeout=10.0)
    shards = [StandIn(shard, address) for shard in range(count)]
    lives = [asyncio.create_task(shard.live(job, number / count)) for number, shard in enumerate(shards)]
    closed = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    while not closed.done():
        status = await stub.GetStatus(pb.GetStatusRequest(), timeout=10.0)
        for shard in shards:
            shard.complete = status.steps_complete
        await asyncio.wait([closed], timeout=ANNOUNCE_S)
    for life in lives:
        life.cancel()


if __name__ == "__main__":
    asyncio.run(main())
