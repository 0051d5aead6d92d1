"""A shard's data plane without a shard: adds pushes to its weights. A test replaces its hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from parashard.errors import ParashardError, QueueFull, ShapeMismatch, StaleIncarnation
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.optimizers import SGD
from parashard.protocol.messages import Ack, Buffers, FoundRows, PullRun, Push, PushResult, Target, VectorRun, Weights
from parashard.transports.base import Greeting
from parashard.transports.shared_weights import PrivateWeights, SharedWeights
from parashard_server.state.rows.embedding_tables import EmbeddingTables

TARGET = Target("run", "digest", 1, 0, 7)
GREETING = Greeting(TARGET, "worker-0")
ROWS_MAX = 2000
TABLES = (
    EmbeddingTable("user", 3, SGD(-1.0), rows_max=ROWS_MAX),
    EmbeddingTable("item", 1024, SGD(-1.0), rows_max=ROWS_MAX),
    EmbeddingTable("word", 3, SGD(-1.0), rows_max=ROWS_MAX, dtype="bfloat16"),
)

_Result = TypeVar("_Result")


class FakePlane:
    """Stands for a `RequestHandler`. Requests take turns, as they do at a shard's lock.

    Parameters
    ----------
    offsets : sequence of int, length partitions + 1
        Where each partition begins, in elements, and where the last one ends.
    memory : callable
        Makes the weights' memory, zero at first; `SharedWeights` where workers map it.

    Attributes
    ----------
    tables : EmbeddingTables
        Of TABLES; a test pushes to them itself.
    row_bytes : int
        What a push may have for them, and a slot for their rows.
    greeted : list of Target
        What each HELLO named.
    pushes : list of Push
        Those whose turn came, with copies of their payloads, which are only borrowed.
    pulls : list of PullRun
        Those whose turn came.
    before : callable
        Called with each request before its turn; may raise or wait.
    apply : callable
        From a push, in its turn, to the version of its ack.
    answered : callable
        From the true answer to a pull, in its turn, to the one that is given.
    after_read : callable
        Called with each pull after its turn, before its answer leaves.
    """

    def __init__(
        self, offsets: Sequence[int], memory: Callable[[Sequence[int]], PrivateWeights | SharedWeights] = PrivateWeights
    ) -> None:
        self.offsets = offsets
        self.memory = memory(offsets)
        self.version = 0
        self.tables = EmbeddingTables(TABLES, 0, 0, 1)
        self.row_bytes = 0
        self.greeted: list[Target] = []
        self.pushes: list[Push] = []
        self.pulls: list[PullRun] = []
        self.before: Callable[[Push | PullRun], None] = lambda request: None
        self.apply: Callable[[Push], int] = self.add
        self.answered: Callable[[Weights], Weights] = lambda weights: weights
        self.after_read: Callable[[PullRun], None] = lambda run: None
        self._turn = threading.RLock()

    @property
    def push_bytes_max(self) -> int:
        return self.memory.weights.nbytes + self.row_bytes

    def check(self, target: Target) -> None:
        self.greeted.append(target)
        self._check(target)

    def push(self, push: Push, timeout_s: float) -> Ack:
        self._begin(push, timeout_s)
        with self._turn:
            self.pushes.append(push._replace(payload=Buffers([bytes(push.payload.whole())])))
            return Ack(PushResult.APPLIED, self.apply(push), push.pulled_version)

    def pull(self, run: PullRun, timeout_s: float, read: Callable[[Weights], _Result]) -> _Result:
        self._begin(run, timeout_s)
        with self._turn:
            self.pulls.append(run)
            result = read(self.answered(Weights(self.version, self._moved(run), self._rows(run))))
        self.after_read(run)
        return result

    def _rows(self, run: PullRun) -> dict[str, FoundRows]:
        self.tables.check_keys(run.keys)
        return self.tables.pull(run.keys, self.version)

    def add(self, push: Push) -> int:
        """Add a gradient to the first of the weights; return the version that they move to."""
        gradient = np.frombuffer(push.payload.whole(), "<f4")
        with self._turn:
            values = self.memory.weights.copy()
            values[: gradient.size] += gradient
            self.move(values)
            return self.version

    def move(self, values: ArrayLike, *partitions: int) -> None:
        """Move these partitions, or all, to the next version, where the weights are these values."""
        memory = self.memory
        whole = np.broadcast_to(np.asarray(values, np.float32), memory.weights.shape)
        with self._turn:
            self.version += 1
            for index in partitions or range(len(self.offsets) - 1):
                run = slice(self.offsets[index], self.offsets[index + 1])
                memory.begun[index] = self.version
                memory.weights[run] = whole[run]
                memory.done[index] = self.version

    def _check(self, target: Target) -> None:
        if target != TARGET:
            raise StaleIncarnation(f"the request names incarnation {target.incarnation}; this is {TARGET.incarnation}")

    def _begin(self, request: Push | PullRun, timeout_s: float) -> None:
        self._check(request.target)
        if timeout_s <= 0:
            raise QueueFull("no time is left for a turn")
        self.before(request)

    def _moved(self, run: PullRun) -> tuple[VectorRun, ...]:
        content, end = self.memory.weights.view(np.uint8).data, run.offset_bytes + run.length_bytes
        if end > content.nbytes:
            raise ShapeMismatch(f"bytes [{run.offset_bytes}, {end}) are not within {content.nbytes}")
        known = -1 if run.known_version is None else run.known_version
        spans = [
            (max(run.offset_bytes, 4 * start), min(end, 4 * stop))
            for (start, stop), done in zip(pairwise(self.offsets), self.memory.done.tolist(), strict=True)
            if done > known
        ]
        return tuple(VectorRun(first, content[first:last]) for first, last in spans if first < last)


def refusing(error: ParashardError) -> Callable[[object], None]:
    """Return a hook that raises an error, once."""
    errors = [error]

    def refuse(request: object) -> None:
        if errors:
            raise errors.pop()

    return refuse
