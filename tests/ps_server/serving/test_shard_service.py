"""The shard's service over real sockets: what the client sends arrives, what the shard refuses comes back as it was."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from parashard._proto import shard_pb2, shard_pb2_grpc
from parashard.client.proto_conversion import intervals_from
from parashard.client.shard_client import ShardClient
from parashard.errors import (
    LimitExceeded,
    MalformedFrame,
    NonFiniteGradient,
    NotReady,
    PeerFailed,
    QueueFull,
    StaleIncarnation,
    StaleRound,
    WrongRun,
)
from parashard.plan.intervals import IntervalSet
from parashard.protocol import rpc, wire
from parashard.protocol.messages import PushResult
from parashard.transports.base import ShardAddress, View
from parashard.transports.grpc import SERVICE
from parashard_server.core.shard import Shard
from parashard_server.shard_host import AdmissionLock
from support.in_process import push_for, use_small_messages
from support.shard_process import DIGEST, PLAN, RUN, ShardProcess
from support.store_fakes import MemoryStore
from support.waiting import DEADLINE_S

GRADIENTS = {"bias": np.array([1.0, 2.0], np.float32), "weight": np.arange(12, dtype=np.float32).reshape(4, 3)}


class Serving:
    """Two shards that listen, and a client of both."""

    def __init__(self, locks: list[AdmissionLock] | None = None, **of_job: Any) -> None:
        self.store = MemoryStore()
        self.processes = [ShardProcess(self.store, index, **of_job) for index in range(2)]
        for process, lock in zip(self.processes, locks or [], strict=False):
            process.host.lock = lock
        self.servers = [rpc.Server("127.0.0.1:0") for _ in self.processes]
        for process, server in zip(self.processes, self.servers, strict=True):
            process.service.add_to(server)
            server.start()
        self.client = ShardClient(RUN, DIGEST, PLAN, "worker-0", retry_budget_s=0.0)
        self.client.use(self.view())

    @property
    def shards(self) -> list[Shard]:
        return [process.shard for process in self.processes]

    def view(self, incarnation: int = 1) -> View:
        return View(1, tuple(ShardAddress(server.address, incarnation) for server in self.servers))

    def inspect(self, index: int, run_id: str = RUN) -> shard_pb2.InspectReply:
        reply: shard_pb2.InspectReply = self.ask(index, "Inspect", shard_pb2.InspectRequest(run_id=run_id))
        return reply

    def ask(self, index: int, method: str, request: Any) -> Any:
        """Call a method that is not a push or a pull."""
        address = self.servers[index].address
        with rpc.connect(address) as channel, rpc.our_errors(address):
            stub = shard_pb2_grpc.ShardStub(channel)  # type: ignore[no-untyped-call]
            return getattr(stub, method)(request, timeout=DEADLINE_S)

    def stop(self) -> None:
        self.client.close()
        for server in self.servers:
            server.stop(grace_s=0.0)


@contextlib.contextmanager
def serving(locks: list[AdmissionLock] | None = None, **of_job: Any) -> Iterator[Serving]:
    served = Serving(locks, **of_job)
    try:
        yield served
    finally:
        served.stop()


def test_a_push_moves_what_a_pull_returns() -> None:
    with serving() as served:
        before = served.client.pull(step=0)
        pushed = served.client.push(0, GRADIENTS, before)
        after = served.client.pull()
        assert [(r.result, r.version, r.staleness) for r in pushed.acks] == [(PushResult.APPLIED, 1, 0)] * 2
        assert (pushed.incarnations, after.versions) == ((1, 1), (1, 1))
        for name, gradient in GRADIENTS.items():
            np.testing.assert_array_equal(after.variables[name], before.variables[name] + gradient)
        again = served.client.push(0, GRADIENTS, before)  # P1
        assert [r.result for r in again.acks] == [PushResult.DUPLICATE] * 2
        np.testing.assert_array_equal(served.client.pull().variables["weight"], after.variables["weight"])


def test_pushes_and_pulls_of_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:  # P4
    use_small_messages(monkeypatch, 8)
    with serving() as served:
        before = served.client.pull()
        served.client.push(0, GRADIENTS, before)
        after = served.client.pull()
        for name, gradient in GRADIENTS.items():
            np.testing.assert_array_equal(after.variables[name], before.variables[name] + gradient)
        assert [process.builder.push_memory.held_bytes for process in served.processes] == [0, 0]


def test_inspect_tells_the_record() -> None:
    with serving() as served:
        pulled = served.client.pull()
        for step in (0, 1, 5, 1):
            served.client.push(step, GRADIENTS, None if step == 5 else pulled)
        served.client.push(6, {}, None, skipped=True)
        record = served.inspect(1)
        assert intervals_from(record.applied) == IntervalSet([(0, 2), (5, 7)])
        assert [(c.staleness, c.pushes) for c in record.staleness] == [(0, 1), (1, 1)]
        size = served.shards[1].storage.weights.nbytes
        assert record == shard_pb2.InspectReply(
            shard=1,
            incarnation=1,
            version=4,
            applied=record.applied,
            duplicate_pushes=1,
            skipped_steps=1,
            staleness=record.staleness,
            unknown_staleness=2,
            step_lag_max=4,
            variable_bytes=size,
            push_bytes=4 * size,
            push_float32_bytes=4 * size,
            pull_bytes=size,
            held=record.applied,
            queue_bytes_max=size,
        )
        assert served.shards[1].record.push_s > 0
        assert served.shards[1].record.pull_s > 0


def test_inspect_in_rounds_tells_what_is_buffered() -> None:
    with serving(consistency="sync:3") as served:
        for step in (0, 2):
            served.client.push(step, GRADIENTS, None)
        record = served.inspect(0)
        assert (record.version, record.buffered_steps, len(record.applied)) == (0, 2, 0)
        assert intervals_from(record.held) == IntervalSet([(0, 1), (2, 3)])
        with pytest.raises(StaleRound):
            served.client.pull(round_=1)
        served.client.push(1, GRADIENTS, None)
        served.client.pull(round_=1)  # P10
        assert (served.inspect(0).version, served.inspect(0).buffered_steps) == (1, 0)


def test_inspect_of_another_run_is_refused() -> None:  # P2
    with serving() as served:
        with pytest.raises(WrongRun, match="of run run-9, the call names run-7"):
            served.inspect(0, "run-7")
        with pytest.raises(WrongRun, match=r"\(none\)"):
            served.inspect(0, "")


def test_a_refusal_comes_back_with_its_class_and_address() -> None:
    with serving() as served:
        bad = GRADIENTS | {"bias": np.array([np.nan, np.inf], np.float32)}
        with pytest.raises(NonFiniteGradient) as refusal:
            served.client.push(0, bad, None)
        assert refusal.value.peer in [server.address for server in served.servers]
        served.client.use(served.view(incarnation=2))
        for request in (lambda: served.client.push(1, GRADIENTS, None), served.client.pull):
            with pytest.raises(StaleIncarnation):  # P3
                request()


def test_a_frame_that_is_not_ours_is_refused() -> None:
    with serving() as served:
        address = served.servers[0].address
        with rpc.connect(address) as channel, rpc.our_errors(address):
            for method in (channel.unary_unary(f"/{SERVICE}/Push"), channel.unary_stream(f"/{SERVICE}/Pull")):
                with pytest.raises(grpc.RpcError) as refusal:
                    list(method(b"GET / HTTP/1.1", timeout=DEADLINE_S))
                assert isinstance(rpc.translated(refusal.value, address), MalformedFrame)
        assert served.inspect(0).refused_pushes == 0  # it was no push


GROWN = {
    "nothing after the beginning": ([], "after 8 of the 24 bytes of a push came a message of 0"),
    "an empty message": ([b""], "came a message of 0"),
    "more than it declares": ([bytes(17)], "came a message of 17"),
    "less than it declares": ([bytes(8)], "after 16 of the 24 bytes of a push came a message of 0"),
}


@pytest.mark.parametrize("case", GROWN)
def test_a_push_whose_messages_are_not_what_it_declares_is_refused_and_holds_nothing(case: str) -> None:  # P4, P14
    rest, says = GROWN[case]
    with serving() as served:
        shard, memory = served.shards[0], served.processes[0].builder.push_memory
        header = wire.push_header(push_for(shard, 0, np.ones(shard.storage.elements)))
        header.total_bytes = 24
        first = wire.encode_frame(header, [memoryview(bytes(8))])
        address = served.servers[0].address
        with rpc.connect(address) as channel, pytest.raises(MalformedFrame, match=says), rpc.our_errors(address):
            channel.stream_unary(f"/{SERVICE}/Push")(iter([first, *rest]), timeout=DEADLINE_S)
        assert (memory.held_bytes, len(shard.updates.applied)) == (0, 0)


def test_a_push_that_no_plan_allows_is_refused_before_memory_is_taken() -> None:  # P19
    with serving() as served:
        shard, memory = served.shards[0], served.processes[0].builder.push_memory
        header = wire.push_header(push_for(shard, 0, np.ones(shard.storage.elements)))
        header.total_bytes = 1 << 40
        address = served.servers[0].address
        with rpc.connect(address) as channel, pytest.raises(LimitExceeded, match="allows"), rpc.our_errors(address):
            channel.unary_unary(f"/{SERVICE}/Push")(wire.encode_frame(header), timeout=DEADLINE_S)
        assert memory.held_bytes_max == 0


def test_a_stopping_shard_takes_no_push_and_still_answers() -> None:
    with serving() as served:
        for process in served.processes:
            process.plane.draining = True
        with pytest.raises(NotReady, match="is stopping"):
            served.client.push(0, GRADIENTS, None)
        with pytest.raises(NotReady, match="is stopping"):
            served.client.pull()
        assert served.inspect(0).version == 0


def test_a_busy_shard_answers_retry_later() -> None:
    locks = [AdmissionLock(1), AdmissionLock(1)]
    with serving(locks) as served:
        with locks[0].held(DEADLINE_S), pytest.raises(QueueFull):
            served.client.push(0, GRADIENTS, None)
        served.client.push(0, GRADIENTS, None)
        assert [len(shard.updates.applied) for shard in served.shards] == [1, 1]


def test_a_broken_invariant_reaches_the_owner_and_the_caller() -> None:  # P14
    broken: list[BaseException] = []
    with serving([AdmissionLock(8, broken.append), AdmissionLock(8, broken.append)]) as served:

        def torn(gradient: np.ndarray, **more: object) -> None:
            raise ZeroDivisionError("in the middle of an update")

        served.shards[0].storage.apply = torn  # type: ignore[method-assign]
        with pytest.raises(PeerFailed, match="ZeroDivisionError: in the middle of an update"):
            served.client.push(0, GRADIENTS, None)
        assert [type(error) for error in broken] == [ZeroDivisionError]


def test_many_workers_at_once_count_every_step_once() -> None:  # P1
    with serving() as served:
        start = served.client.pull().variables

        def work() -> None:
            client = ShardClient(RUN, DIGEST, PLAN, "worker", retry_budget_s=DEADLINE_S)
            client.use(served.view())
            try:
                for step in range(20):
                    client.push(step, {"bias": np.ones(2, np.float32)}, None)
            finally:
                client.close()

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(DEADLINE_S)
        pulled = served.client.pull()
        assert pulled.versions == (20, 20)
        np.testing.assert_array_equal(pulled.variables["bias"] - start["bias"], [20.0, 20.0])
        assert served.inspect(0).duplicate_pushes == 40
