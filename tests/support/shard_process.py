"""A shard's process without sockets, in virtual time: shared by tests of checkpoints, lifecycle and service."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.state import ShardState, load
from parashard.client.proto_conversion import plan_message
from parashard.job.load import as_toml, job_from_toml
from parashard.plan.partition import fixed_shards
from parashard.plan.variables import Initializer, Variable
from parashard.store import Store
from parashard.store.claims import Claims
from parashard_server.build import ShardBuilder
from parashard_server.core.shard import Shard
from parashard_server.durability.lifecycle import ShardLifecycle
from parashard_server.serving.grpc_service import ShardService
from parashard_server.serving.request_handler import RequestHandler
from parashard_server.shard_host import AdmissionLock
from support.in_process import plan_of, push, variables_of

RUN, DIGEST, SEED, STEPS = "run-9", "e" * 64, 11, 40
VARIABLES = variables_of(Variable("bias", (2,)), Variable("weight", (4, 3), Initializer("normal", 1.0)))
PLAN = plan_of(VARIABLES, shards=2, partitioner=fixed_shards(2))
COUNTING = {"kind": "sgd", "learning_rate": -1.0}
"""Adds every gradient to the weights: with integers the sums are exact."""
ADAM = {"kind": "adam", "learning_rate": 0.1}
"""Has slots and counts its updates: a state that is not restored whole goes another way."""

_PROCESSES = count()


def job_reply(
    *,
    optimizer: dict[str, Any] | None = None,
    consistency: str = "async",
    reduce: str = "mean",
    checkpoint: dict[str, Any] | None = None,
    tables: dict[str, Any] | None = None,
    queue_bytes: int = 4096,
    **changed: Any,
) -> pb.GetJobReply:
    """Return what a coordinator says of a small job."""
    text = f"""
        [job]
        name = "test"
        seed = {SEED}
        epochs = 1
        batch_size = 1
        [data]
        source = "digits"
        [model]
        kind = "ledger"
        [optimizer]
        kind = "sgd"
        learning_rate = -1.0
        [consistency]
        policy = "{consistency}"
        reduce = "{reduce}"
        [cluster]
        queue_bytes = {queue_bytes}
        """
    overrides = [(f"optimizer.{key}", value, "--set") for key, value in (optimizer or {}).items()]
    overrides += [(f"checkpoint.{key}", value, "--set") for key, value in (checkpoint or {}).items()]
    overrides += [(f"tables.{name}", table, "--set") for name, table in (tables or {}).items()]
    fields = {
        "run_id": RUN,
        "job_digest": DIGEST,
        "job_toml": as_toml(job_from_toml(text, overrides)),
        "plan": plan_message(PLAN),
        "steps_total": STEPS,
        **changed,
    }
    return pb.GetJobReply(**fields)


class ShardProcess:
    """What `parashard_server.__main__` puts together, but for servers and threads."""

    def __init__(self, store: Store, index: int = 0, *, reply: pb.GetJobReply | None = None, **of_job: Any) -> None:
        reply = reply or job_reply(**of_job)
        self.now_s = 0.0  # the checkpointer's clock
        self.store = store
        self.catalogue = Catalogue(store)
        self.builder = builder = ShardBuilder(reply, index, store)
        claims = Claims(store, f"shard-{index}", f"process-{next(_PROCESSES)}")
        self.lifecycle = ShardLifecycle(builder, reply, self.catalogue, claims, clock=lambda: self.now_s)
        self.host, self.checkpointer = self.lifecycle.host, self.lifecycle.checkpointer
        self.host.lock = AdmissionLock(64, broken=lambda error: None)  # what breaks fails the test, not its process
        self.plane = RequestHandler(self.host, self.lifecycle)
        self.service = ShardService(self.plane, self.host, self.checkpointer, self.lifecycle, builder.push_memory)

    @property
    def shard(self) -> Shard:
        """The incarnation that is served."""
        return self.host.shard

    def push(self, *steps: int) -> None:
        """Push the gradient of each step, and let the checkpointer look, as the service does."""
        for step in steps:
            push(self.shard, step, gradient_of(self.shard, step))
            self.checkpointer.cut_if_due(self.shard)

    def reach(self, round_: int) -> None:
        """Let the first request of a round arrive."""
        self.shard.updates.reach(round_)
        self.checkpointer.cut_if_due(self.shard)

    def stored(self) -> list[str]:
        """Return the ids of the checkpoints in the store, the oldest first."""
        return [str(id_) for id_ in self.catalogue.checkpoints()]

    def numbers(self) -> list[int]:
        """Return their numbers."""
        return [id_.number for id_ in self.catalogue.checkpoints()]

    def id_of(self, number: int) -> CheckpointId:
        """Return the id of a checkpoint of the incarnation that is served."""
        mine = self.shard.identity
        return CheckpointId(mine.plan_version, mine.shard, mine.incarnation, number)

    def state_in(self, id_: CheckpointId) -> ShardState:
        """Return what is in a checkpoint."""
        return load(self.store, self.catalogue.manifest(id_))


def gradient_of(shard: Shard, step: int) -> np.ndarray:
    """Return a gradient that no other step has."""
    return np.random.default_rng(step).normal(size=shard.storage.elements).astype(np.float32)


def bits_of(shard: Shard) -> tuple[bytes, dict[str, bytes], list[tuple[int, int]], int, int | None]:
    """Return everything that decides how a shard goes on from here: weights, slots, steps, version and round."""
    slots = {name: slot.tobytes() for name, slot in shard.storage.slots.items()}
    updates = shard.updates
    return shard.storage.weights.tobytes(), slots, list(updates.applied.intervals()), updates.version, updates.round


def bits_in(state: ShardState, shard: Shard) -> tuple[bytes, dict[str, bytes], list[tuple[int, int]], int, int | None]:
    """Return the same of a checkpoint, in the layout of a shard."""
    held = [placed.partition for placed in shard.storage.layout]
    weights = b"".join(state.variables[p].tobytes() for p in held)
    slots = {name: b"".join(slot[p].tobytes() for p in held) for name, slot in state.slots.items()}
    return weights, slots, list(state.applied.intervals()), state.version, state.round
