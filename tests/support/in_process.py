"""Shards in this process, behind channels that are function calls: what the tests of several folders share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parashard.client.shard_client import ShardClient
from parashard.errors import ParashardError
from parashard.plan.optimizers import SGD, OptimizerSpec
from parashard.plan.partition import Partitioner, Plan, place, split, whole
from parashard.plan.variables import Initializer, Variable
from parashard.protocol import wire
from parashard.protocol.messages import PullRun, PushChunk, PushResult, Receipt, Slice, Target
from parashard.transports.base import Greeting, ShardAddress, View
from parashard.transports.grpc import GrpcTransport
from parashard_server.core.assembly import Assemblies
from parashard_server.core.shard import Shard
from parashard_server.core.update_policies import ImmediateUpdates, RoundUpdates, UpdatePolicy
from parashard_server.serving.push_memory import PushMemory
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.pulled_weights import PulledWeights
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
    damping: bool = False,
    budget_bytes: int = 1 << 20,
    compensation: float = 0.0,
    copies: int = 8,
    incarnation: int = 1,
) -> Shard:
    """Return a fresh shard; with `round_steps` it folds rounds."""
    storage = Storage(plan, index, Optimizer(spec), drawn_from(SEED))
    updates: UpdatePolicy
    if round_steps is None:
        updates = ImmediateUpdates(storage, damping=damping)
    else:
        updates = RoundUpdates(storage, round_steps=round_steps, steps_total=steps, mean=mean)
    pulled = PulledWeights(storage.elements, copies) if compensation else None
    assemblies = Assemblies(PushMemory(budget_bytes))
    identity = Target(RUN, DIGEST, plan.version, index, incarnation)
    return Shard(identity, steps, storage, updates, assemblies, pulled=pulled, compensation=compensation)


def slices_of(shard: Shard) -> tuple[Slice, ...]:
    """Return the slices of a whole push: every partition that is not frozen."""
    variables = shard.storage.variables
    return tuple(
        Slice(placed.partition, variables[placed.partition.variable].row_elements)
        for placed in shard.storage.layout
        if not variables[placed.partition.variable].frozen
    )


def chunks_of(
    shard: Shard,
    step: int,
    gradient: Any,
    *,
    attempt: int = 1,
    cuts: tuple[int, ...] = (),
    pulled_version: int | None = None,
    **changed: Any,
) -> list[PushChunk]:
    """Return a push in pieces, cut at these bytes; `changed` replaces fields of every chunk."""
    content = np.asarray(gradient, "<f4").tobytes()
    bounds = [0, *cuts, len(content)]
    fields = {
        "target": shard.identity,
        "worker": "worker-0",
        "step": step,
        "attempt": attempt,
        "total_bytes": len(content),
        "skipped": False,
        "pulled_version": pulled_version,
    }
    return [
        PushChunk(
            **(
                fields
                | {
                    "offset_bytes": bounds[i],
                    "slices": slices_of(shard) if bounds[i] == 0 else (),
                    "payload": content[bounds[i] : bounds[i + 1]],
                }
                | changed
            )
        )
        for i in range(len(bounds) - 1)
    ]


def push(shard: Shard, step: int, gradient: Any, *, now_s: float = 0.0, **more: Any) -> Receipt:
    """Push a whole gradient, given in the shard's layout or as one number for every element."""
    full = np.broadcast_to(np.asarray(gradient, np.float32), sum(s.size_bytes for s in slices_of(shard)) // 4)
    receipt = Receipt(PushResult.PENDING, 0, None)
    for chunk in chunks_of(shard, step, full, **more):
        receipt = shard.push(chunk, now_s)
        if receipt.result is not PushResult.PENDING:
            break  # as the client does
    return receipt


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


def use_small_chunks(monkeypatch: Any, size_bytes: int) -> None:
    """Let gRPC messages carry no more than so many bytes of payload."""
    for module in ("protocol.wire", "transports.grpc"):
        monkeypatch.setattr(f"parashard.{module}.CHUNK_BYTES_MAX", size_bytes)


class Finished:
    """A gRPC call that is over."""

    def __init__(self, call: Callable[[], bytes]) -> None:
        self._frame, self._error = b"", None
        try:
            self._frame = call()
        except ParashardError as error:
            self._error: ParashardError | None = error

    def result(self) -> bytes:
        if self._error is not None:
            raise self._error
        return self._frame

    def cancel(self) -> None:
        """It is over."""


class Channel:
    """A gRPC channel whose calls are function calls, and over when they return.

    Parameters
    ----------
    push, pull : callable
        From a frame to the answer's.
    """

    def __init__(self, push: Callable[[bytes], bytes], pull: Callable[[bytes], bytes]) -> None:
        self._answers = {"Push": push, "Pull": pull}

    def unary_unary(self, path: str) -> Method:
        return Method(self._answers[path.rpartition("/")[2]])

    def close(self) -> None:
        """Nothing is open."""


class Method:
    """One method of a channel."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer

    def future(self, frame: bytes, timeout: float) -> Finished:
        return Finished(lambda: self._answer(frame))


class Cluster:
    """Shards under the addresses "shard-0", "shard-1" and so on; every frame passes through the gRPC transport.

    `before` may be set to a function of (address, decoded request): it is called first, and may raise.
    """

    def __init__(self, plan: Plan, **of_shard: Any) -> None:
        self.plan = plan
        self.shards = [shard_of(plan, index, **of_shard) for index in range(len(plan.shards))]
        self.before: Callable[[str, PushChunk | PullRun], None] = lambda address, request: None
        self.pushes: list[PushChunk] = []
        self._turn = threading.Lock()

    def view(self, number: int = 1) -> View:
        lives = [shard.identity.incarnation for shard in self.shards]
        return View(number, tuple(ShardAddress(f"shard-{index}", life) for index, life in enumerate(lives)))

    def client(self, **more: Any) -> ShardClient:
        client = ShardClient(RUN, DIGEST, self.plan, "worker-0", connect=self.connect, **more)
        client.use(self.view())
        return client

    def connect(self, where: ShardAddress, greeting: Greeting) -> GrpcTransport:
        return GrpcTransport(where, greeting, connect=self._channel)

    def _channel(self, address: str) -> Channel:
        return Channel(lambda frame: self.answer_push(address, frame), lambda frame: self.answer_pull(address, frame))

    def weights(self, round_: int | None = None) -> dict[str, np.ndarray]:
        """Return every variable, whole."""
        return self.client().pull(round_=round_).variables

    def answer_push(self, address: str, frame: bytes) -> bytes:
        with self._turn:
            chunk = wire.decode_push(frame)
            self.pushes.append(chunk)
            self.before(address, chunk)
            return wire.encode_receipt(self.shards[int(address[6:])].push(chunk, 0.0))

    def answer_pull(self, address: str, frame: bytes) -> bytes:
        with self._turn:
            run = wire.decode_pull(frame)
            self.before(address, run)
            return wire.encode_weights(self.shards[int(address[6:])].pull(run))
