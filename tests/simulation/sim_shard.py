"""A shard's process around the real service, lifecycle and checkpointer, in virtual time.

Does what `parashard_server.__main__` does: restores, announces itself, saves by its schedule, obeys the coordinator.
Knows no fault, but for what a crash does to its disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sim_jobs import STEPS
from sim_network import Network
from sim_parts import COORDINATOR, DIGEST, RUN_ID, Builder, Parts, PullFrame, PushMessage
from sim_store import SimulatedStore
from sim_world import Process, Promise, World

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.retention import CommonRounds
from parashard.client.proto_conversion import interval_messages
from parashard.errors import ParashardError, RetryLater
from parashard.protocol import wire
from parashard.store.claims import Claims
from parashard_server.core.shard import Shard
from parashard_server.durability.lifecycle import ShardLifecycle
from parashard_server.serving.grpc_service import ShardService
from parashard_server.serving.request_handler import RequestHandler
from parashard_server.shard_host import AdmissionLock

ANNOUNCE_S = 1.0
ANNOUNCE_AGAIN_S = 0.1
ANNOUNCE_DEADLINE_S = 0.3
LOOK_S = 0.1
COPY_S = (0.0, 0.01)  # of a partition
WRITE_S = (0.001, 0.2)  # of a checkpoint's files
CALL_S = 0.3  # a little more than the caller's deadline


class ShardProcess(Process):
    """One process of one shard. An error that is not ours means a broken invariant: it ends the simulation (P14).

    Parameters
    ----------
    builder : Builder
        Makes its incarnations.
    network : Network
        Carries its calls.
    address : str
        Where it listens.
    store : SimulatedStore
        Where its states are saved.
    parts : Parts
        What it is made of.
    """

    crash = "shard_crash"
    pause = "shard_pause"
    hang = "shard_hang"

    def __init__(
        self,
        world: World,
        builder: Builder,
        network: Network,
        address: str,
        store: SimulatedStore,
        parts: Parts,
    ) -> None:
        super().__init__(world, f"shard-{builder.index}")
        self.address = address
        self.index = builder.index
        self._network = network
        self._store = store
        self._habits = parts.habits
        self._parts_of_batch = builder.parts_of_batch
        self._stopping = False
        reply = pb.GetJobReply(run_id=RUN_ID, job_digest=DIGEST)
        claims = Claims(store, self.name, f"{world.now_s!r}/{world.events}")
        clock: Callable[[], float] = lambda: world.now_s  # noqa: E731
        self.lifecycle = ShardLifecycle(builder, reply, Catalogue(store), claims, clock=clock)  # type: ignore[arg-type]
        self.host, self.checkpointer = self.lifecycle.host, self.lifecycle.checkpointer
        self.host.lock = AdmissionLock(1, broken=lambda error: None)  # it is raised, and ends the simulation
        self._plane = RequestHandler(self.host, self.lifecycle, clock=clock, version_wait_s=0.0)
        self._memory = builder.push_memory
        self._calls: dict[int, _PushCall] = {}
        self.service = ShardService(self._plane, self.host, self.checkpointer, self.lifecycle, builder.push_memory)
        world.fired["shard restored a checkpoint"] += "restored p1" in self.host.restored
        world.fired["shard went back to an earlier chain"] += (
            "restored p1" in self.host.restored and "the manifest says" in self.host.restored
        )
        world.note(f"{self.name} starts: {self.host.restored}")
        network.hosts[address] = self

    @property
    def shard(self) -> Shard:
        """The incarnation that is served."""
        return self.host.shard

    def start(self) -> None:
        """Begin to announce itself and to save."""
        self.spawn(self._announce)
        self.spawn(self._save)

    def receive(self, request: Any) -> Any:
        """Answer a frame with a frame, and a command with its reply."""
        if isinstance(request, PullFrame):
            [frame] = self.service.pull(request.frame, _NO_LIMIT)  # type: ignore[arg-type]
            return frame
        if isinstance(request, PushMessage):
            return self._receive_push(request)
        if isinstance(request, shard_pb2.TakeCheckpointRequest):
            return self.service.TakeCheckpoint(request, None)
        assert isinstance(request, shard_pb2.RollbackRequest)
        reply = self.service.Rollback(request, None)
        self.world.fired["rollback"] += 1
        return reply

    def crashing(self) -> None:
        """Count what the crash cuts in two, and let the disk suffer."""
        world = self.world
        world.fired["crash between cut and manifest"] += self.checkpointer.pending is not None
        lacks_steps = len(self.shard.updates.applied) < STEPS  # what is done with is not computed again (P20)
        if lacks_steps and world.faults.rows_damaged and world.rng.random() < world.faults.rows_damaged:
            world.fired["rows_damaged"] += self._damage_rows()

    def _damage_rows(self) -> bool:
        """Change a file that the newest checkpoint's chain began with; return whether there was one."""
        ids = Catalogue(self._store.sound).shard_checkpoints(1, self.index)
        files = Catalogue(self._store.sound).manifest(ids[-1]).table_files if ids else ()
        if not files:
            return False
        file = min(files, key=lambda file: (file.incarnation, file.number, file.name))
        name = f"{CheckpointId(1, self.index, file.incarnation, file.number).folder}/{file.name}"
        self._store.contents[name] = self._store.contents[name][:-1] + b"?"
        return True

    def _receive_push(self, message: PushMessage) -> bytes | Promise[bytes] | None:
        """Put the messages of a call in order; its memory is taken with the first, and the push served with the last.

        A call whose messages are not all here in time is over: what came of it is forgotten. The last message of a call
        that was served comes twice where the whole call was replayed.
        """
        number = message.step if "P4-calls-mixed" in self._habits else message.call
        call = self._calls.get(number)
        if call is None:
            call = self._calls[number] = _PushCall()
            self.world.after(CALL_S, lambda: self._end_call(number, call))
        call.messages[message.index] = message.frame
        if message.last:
            call.count = message.index + 1
        if message.index == 0 and not message.last and not call.held_bytes and not call.served:
            header, _ = wire.decode_push(message.frame)
            self._plane.check(wire.target(header.target))
            self._memory.take(header.total_bytes)
            call.held_bytes = header.total_bytes
        if message.last:
            call.answer = Promise()
        if len(call.messages) != call.count or call.ended or not (message.last or not call.served):
            return call.answer if message.last else None
        self._release(call)
        call.served = True
        try:
            answer = self._push(call.whole())
        except ParashardError as error:
            if message.last:
                raise
            call.answer.settle(error=error)
            return None
        if message.last:
            return answer
        call.answer.settle(answer)
        return None

    def _end_call(self, number: int, call: _PushCall) -> None:
        if "P4-calls-mixed" not in self._habits:
            self._calls.pop(number, None)
            call.ended = True
        self._release(call)
        self.world.fired["push cut in the middle"] += not call.served and self.alive

    def _release(self, call: _PushCall) -> None:
        self._memory.give_back(call.held_bytes)
        call.held_bytes = 0

    def _push(self, frame: bytes) -> bytes:
        before = self.shard.updates.held.copy()
        skipped = len(self.shard.updates.skipped)
        try:
            ack: bytes = self.service.push(iter([frame]), _NO_LIMIT)  # type: ignore[arg-type]
        except ParashardError as error:
            self.world.fired[f"refused: {error.code}"] += 1
            raise
        finally:
            gave_way = len(self.shard.updates.skipped) > skipped and len(self.shard.updates.held) <= len(before)
            self.world.fired["skip after a partial push"] += gave_way
            self.world.fired["round began again"] += gave_way and self.shard.updates.held != before
        parts = self._parts_of_batch
        torn = [edge for run in self.shard.updates.applied.intervals() for edge in run if edge % parts]
        if torn:
            self.world.violated(f"batch: {self.name} has applied a part of a batch, at step {torn[0]}")
        result = wire.decode_ack(ack).result.name
        self.world.note(f"{self.name} {result}")
        self.world.fired[f"ack: {result.lower()}"] += 1
        return ack

    # --- what it does by itself ---

    async def _announce(self) -> None:
        """Announce itself once a second, and a new incarnation at once; end if a newer one has its place (P3)."""
        next_s = self.world.now_s
        while not self._stopping:
            if self.lifecycle.claims.superseded is not None and "P23-superseded-goes-on" not in self._habits:
                raise self.lifecycle.claims.superseded  # P23
            if not self.host.changed.is_set() and self.world.now_s < next_s:
                await self.world.sleep(LOOK_S)
                continue
            self.host.changed.clear()
            next_s = self.world.now_s + ANNOUNCE_S
            try:
                reply = await self._network.call(self, COORDINATOR, self._registration(), ANNOUNCE_DEADLINE_S)
            except RetryLater:
                next_s = self.world.now_s + ANNOUNCE_AGAIN_S
                continue
            cut_round = reply.cut_round if reply.HasField("cut_round") else None
            self.checkpointer.saved.common = CommonRounds(cut_round, frozenset(reply.kept_rounds))
            self.service.coordinator_incarnation = max(
                self.service.coordinator_incarnation, reply.coordinator_incarnation
            )

    def _registration(self) -> pb.RegisterShardRequest:
        mine, updates = self.shard.identity, self.shard.updates
        returnable, chains = self.lifecycle.saved_rounds()
        return pb.RegisterShardRequest(
            run_id=RUN_ID,
            job_digest=DIGEST,
            shard=mine.shard,
            incarnation=mine.incarnation,
            first_incarnation=self.lifecycle.first_incarnation,
            address=self.address,
            applied=interval_messages(updates.applied),
            held=interval_messages(updates.held),
            skipped=interval_messages(updates.skipped),
            checkpoint_rounds=returnable,
            chain_rounds=chains,
            restored=self.host.restored,
        )

    async def _save(self) -> None:
        """Save what is cut, a partition at a time, while pushes go on."""
        while True:
            await self.world.sleep(self.world.rng.uniform(0.0, LOOK_S))
            if self.world.strikes("shard_stop"):
                self._stop()
                return
            self.checkpointer.cut_if_due(self.shard)
            cut = self.checkpointer.pending
            if cut is None:
                continue
            more = True
            while more:
                await self.world.sleep(self.world.rng.uniform(*COPY_S))
                more = cut.snapshot.save_next()
            await self.world.sleep(self.world.rng.uniform(*WRITE_S))
            self.world.fired["pushes beside a checkpoint"] += cut.version != self.shard.updates.version
            self.checkpointer.save_pending()

    def _stop(self) -> None:
        """Accept nothing more, save, and end, as after SIGTERM."""
        self._stopping = self._plane.draining = True
        try:
            self.checkpointer.take()
        except ParashardError as error:
            self.world.note(str(error))
        self.end("stopped")


@dataclass(eq=False)
class _PushCall:
    """What has come of a call of Push."""

    messages: dict[int, bytes] = field(default_factory=dict)
    count: int = 0  # of its messages; 0: the last is not here
    held_bytes: int = 0
    served: bool = False
    ended: bool = False
    answer: Promise[bytes] = field(default_factory=Promise)

    def whole(self) -> bytes:
        """Return the push as one message, so that its memory is counted to the byte."""
        first, *rest = (self.messages[index] for index in range(self.count))
        header, begin = wire.decode_push(first)
        return wire.encode_frame(header, [begin, *(memoryview(more) for more in rest)])


class _NoLimit:
    """A call's context without a deadline and without TLS, from this host."""

    def time_remaining(self) -> None:
        """There is none."""

    def auth_context(self) -> dict[str, list[bytes]]:
        """There are no certificates."""
        return {}

    def peer(self) -> str:
        """Every worker is the same peer."""
        return "unix:"


_NO_LIMIT = _NoLimit()
