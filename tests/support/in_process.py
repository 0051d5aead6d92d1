"""Shards in this process, behind channels that are function calls: what the tests of several folders share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.client.pulled_rows import TableSet
from parashard.client.shard_client import ShardClient
from parashard.errors import ParashardError
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.optimizers import SGD, OptimizerSpec
from parashard.plan.partition import Partitioner, Plan, place, split, whole
from parashard.plan.variables import Initializer, Variable
from parashard.protocol import wire
from parashard.protocol.messages import Ack, Buffers, PullRun, Push, Slice, Target
from parashard.transports.base import Greeting, ShardAddress, View
from parashard.transports.grpc import GrpcTransport
from parashard_server.core.shard import Shard
from parashard_server.core.update_policies import ImmediateUpdates, RoundUpdates, UpdatePolicy
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.rows.embedding_tables import EmbeddingTables
from parashard_server.state.storage import Storage, drawn_from

RUN, DIGEST, SEED, STEPS = "run-1", "d" * 64, 3, 40
COUNTING = SGD(learning_rate=-1.0)
"""Adds every gradient to the weights: with integers the sums are exact."""


def variables_of(*variables: Variable) -> dict[str, Variable]:
    return {variable.name: variable for variable in variables}


WEIGHT_AND_BIAS = variables_of(Variable("bias", (2,)), Variable("weight", (4, 3), Initializer("normal", 1.0)))


def plan_of(variables: Mapping[str, Variable], shards: int = 1, partitioner: Partitioner = whole) -> Plan:
    return place(variables, split(variables, partitioner), shards, version=5)


def shard_of(
    plan: Plan,
    index: int = 0,
    *,
    spec: OptimizerSpec = COUNTING,
    steps: int = STEPS,
    round_steps: int | None = None,
    mean: bool = True,
    incarnation: int = 1,
    tables: EmbeddingTables | None = None,
) -> Shard:
    """Return a fresh shard; with `round_steps` it folds rounds."""
    storage = Storage(plan, index, Optimizer(spec), drawn_from(SEED))
    updates: UpdatePolicy
    if round_steps is None:
        updates = ImmediateUpdates(storage, tables=tables)
    else:
        updates = RoundUpdates(storage, round_steps=round_steps, steps_total=steps, mean=mean, tables=tables)
    identity = Target(RUN, DIGEST, plan.version, index, incarnation)
    return Shard(identity, steps, storage, updates, tables=tables)


def slices_of(shard: Shard) -> tuple[Slice, ...]:
    """Return the slices of a whole push: every partition that is not frozen."""
    variables = shard.storage.variables
    return tuple(
        Slice(placed.partition, variables[placed.partition.variable].row_elements)
        for placed in shard.storage.layout
        if not variables[placed.partition.variable].frozen
    )


def push_for(shard: Shard, step: int, gradient: Any, *, pulled_version: int | None = None, **changed: Any) -> Push:
    """Return a push of a gradient in the shard's layout; `changed` replaces fields."""
    content = np.asarray(gradient, "<f4").tobytes()
    whole = Push(shard.identity, "worker-0", step, slices_of(shard), False, pulled_version, Buffers([content]))
    return whole._replace(**changed)


def push(shard: Shard, step: int, gradient: Any, **more: Any) -> Ack:
    """Push a whole gradient, given in the shard's layout or as one number for every element."""
    full = np.broadcast_to(np.asarray(gradient, np.float32), sum(s.size_bytes for s in slices_of(shard)) // 4)
    return shard.push(push_for(shard, step, full, **more))


def pull(shard: Shard, *, round_: int | None = None, step: int | None = None) -> tuple[int, np.ndarray]:
    """Return (version, a copy of the weights)."""
    weights = shard.pull(PullRun(shard.identity, round_, step, 0, shard.storage.weights.nbytes))
    return weights.version, np.frombuffer(b"".join(run.values for run in weights.runs), "<f4")


def state_of(shard: Shard) -> tuple[bytes, dict[str, bytes], list[tuple[int, int]], int, int]:
    """Return all that a refusal must not change, bit by bit (P14)."""
    return (
        shard.storage.weights.tobytes(),
        {name: slot.tobytes() for name, slot in shard.storage.slots.items()},
        list(shard.updates.applied.intervals()),
        shard.updates.version,
        shard.updates.buffered_steps,
    )


def use_small_messages(monkeypatch: Any, size_bytes: int) -> None:
    """Let gRPC messages be sent with no more than so many bytes of payload."""
    for module in ("parashard.protocol.wire", "parashard.transports.grpc"):
        monkeypatch.setattr(f"{module}.MESSAGE_BYTES", size_bytes)


def received(messages: Iterable[bytes]) -> Push:
    """Return the push in the messages of a call, as a shard receives it."""
    messages = iter(messages)
    header, first = wire.decode_push(next(messages))
    content = b"".join((first, *messages))
    assert len(content) == header.total_bytes
    return wire.push_from(header, memoryview(content))


class Finished:
    """A gRPC call that is over."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._answer: Any = None
        self._error: ParashardError | None = None
        try:
            self._answer = call()
        except ParashardError as error:
            self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer

    def __iter__(self) -> Iterator[bytes]:
        yield from self.result()

    def cancel(self) -> None:
        """It is over."""


class Channel:
    """A gRPC channel whose calls are function calls, and over when they return.

    Parameters
    ----------
    push : callable
        From the messages of a push to the answer.
    pull : callable
        From a frame to the messages of the answer.
    """

    def __init__(self, push: Callable[[Iterable[bytes]], bytes], pull: Callable[[bytes], Iterable[bytes]]) -> None:
        self._push = push
        self._pull = pull

    def unary_unary(self, path: str) -> Method:
        def pulled(frame: bytes) -> bytes:
            (answer,) = self._pull(frame)
            return answer

        return Method(pulled if path.endswith("/Pull") else lambda frame: self._push([frame]))

    def stream_unary(self, path: str) -> Method:
        return Method(self._push)

    def unary_stream(self, path: str) -> Callable[..., Finished]:
        return Method(lambda frame: list(self._pull(frame))).future

    def close(self) -> None:
        """Nothing is open."""


class Method:
    """One method of a channel."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer

    def __call__(self, request: Any, timeout: float) -> Any:
        return self._answer(request)

    def future(self, request: Any, timeout: float) -> Finished:
        return Finished(lambda: self._answer(request))


class Cluster:
    """Shards under the addresses "shard-0", "shard-1" and so on; every frame passes through the gRPC transport.

    `before` may be set to a function of (address, decoded request): it is called first, and may raise. Each shard has
    the rows of `tables` whose keys are in its buckets.
    """

    def __init__(self, plan: Plan, *, tables: Sequence[EmbeddingTable] = (), **of_shard: Any) -> None:
        self.plan = plan
        self.tables = tuple(tables)
        shards = len(plan.shards)
        self.shards = [
            shard_of(plan, index, tables=EmbeddingTables(tables, SEED, index, shards) if tables else None, **of_shard)
            for index in range(shards)
        ]
        self.before: Callable[[str, Push | PullRun], None] = lambda address, request: None
        self.pushes: list[Push] = []
        self._turn = threading.Lock()

    def view(self, number: int = 1) -> View:
        incarnations = [shard.identity.incarnation for shard in self.shards]
        return View(
            number, tuple(ShardAddress(f"shard-{index}", incarnation) for index, incarnation in enumerate(incarnations))
        )

    def client(self, **more: Any) -> ShardClient:
        tables = TableSet(self.tables, SEED)
        client = ShardClient(RUN, DIGEST, self.plan, "worker-0", connect=self.connect, tables=tables, **more)
        client.use(self.view())
        return client

    def connect(self, where: ShardAddress, greeting: Greeting) -> GrpcTransport:
        return GrpcTransport(where, greeting, connect=self._channel)

    def _channel(self, address: str) -> Channel:
        return Channel(
            lambda messages: self.answer_push(address, messages), lambda frame: self.answer_pull(address, frame)
        )

    def weights(self, round_: int | None = None) -> dict[str, np.ndarray]:
        """Return every variable, whole."""
        return self.client().pull(round_=round_).variables

    def answer_push(self, address: str, messages: Iterable[bytes]) -> bytes:
        with self._turn:
            push = received(messages)
            self.pushes.append(push)
            self.before(address, push)
            return wire.encode_ack(self.shards[int(address[6:])].push(push))

    def answer_pull(self, address: str, frame: bytes) -> Iterator[bytes]:
        run = wire.decode_pull(frame)
        for part in wire.parts_of(run):
            with self._turn:
                self.before(address, part)
                yield wire.encode_weights(self.shards[int(address[6:])].pull(part))
