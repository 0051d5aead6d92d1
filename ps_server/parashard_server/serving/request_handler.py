"""RequestHandler: pushes and pulls on the shard that is served now, over any transport.

Calls the core under the shard's lock, and measures time. Knows no wire format. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from parashard.errors import NotReady, QueueFull, StaleIncarnation, TooEarly
from parashard.process import failpoints
from parashard.protocol.messages import Ack, PullRun, Push, PushResult, Target, Weights
from parashard.telemetry.tracing import NO_SPAN
from parashard_server.core.shard import Shard
from parashard_server.core.update_policies import FoldedStep
from parashard_server.durability.lifecycle import ShardLifecycle
from parashard_server.shard_host import ShardHost

if TYPE_CHECKING:
    from parashard.telemetry.tracer import RequestSpan, Tracer

_Result = TypeVar("_Result")

VERSION_WAIT_S = 0.25
"""Longest wait of a pull for its least version; after it a worker asks for another step."""
WAITING_MAX = 32
"""Most pulls that wait: fewer than the threads of gRPC, of which pushes need some."""


class RequestHandler:
    """Serves pushes and pulls. A tracer makes a span of every request that has a trace context."""

    def __init__(
        self,
        host: ShardHost,
        lifecycle: ShardLifecycle,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
        version_wait_s: float = VERSION_WAIT_S,
    ) -> None:
        self._host = host
        self._lifecycle = lifecycle
        self._tracer = tracer
        self._clock = clock
        self._version_wait_s = version_wait_s
        self.draining = False
        self._moved = threading.Condition()
        self._version = 0  # of the weights, as of the last update
        self._waiting = 0  # pulls
        self._changes = (0, 0)  # of tables, as the last request left them

    @property
    def push_bytes_max(self) -> int:
        """Length of the longest valid push: every partition as float32, and each table's most keys."""
        shard = self._host.shard
        return shard.storage.weights.nbytes + (0 if shard.tables is None else shard.tables.push_bytes_max)

    def check(self, target: Target) -> None:
        """Refuse a request that is not meant for the present incarnation, or any while the shard is stopping."""
        if self.draining:
            raise self._stopping()
        self._host.shard.check_target(target)

    def push(self, push: Push, timeout_s: float) -> Ack:
        """Take a push, whose payload is borrowed until the call returns."""
        # Raises as `Shard.push`; `NotReady` while the shard is stopping, `QueueFull` if the lock was not free in time,
        # `StaleIncarnation` if the round had to begin again.
        tracer = self._tracer
        with NO_SPAN if tracer is None else tracer.request("push", push, self._clock()) as traced:
            if self.draining:
                raise self._stopping()
            failpoints.hit("shard.push.received")
            try:
                with self._host.lock.held(timeout_s):
                    shard = self._host.shard
                    began_s, version = self._clock(), shard.updates.version
                    if traced is not None:
                        traced.began_s = began_s
                    try:
                        ack = shard.push(push)
                        if shard.updates.version != version:
                            self._weights_moved(shard, began_s, traced)
                        self._host.after_request(shard, self._clock() - began_s)
                    finally:
                        shard.record.push_s += self._clock() - began_s
            except FoldedStep as folded:
                self._lifecycle.begin_round_again(push.target.incarnation, push.step, push.learning_rate)
                raise StaleIncarnation(f"{folded}; it begins again without it, in another incarnation") from None
            if ack.result in (PushResult.APPLIED, PushResult.BUFFERED):
                failpoints.hit("shard.push.applied")
            if traced is not None:
                traced.answered(ack)
            return ack

    def pull(self, run: PullRun, timeout_s: float, read: Callable[[Weights], _Result]) -> _Result:
        """Return the result of `read`, during which the weights' views are valid. Raises as `Shard.pull` and `push`."""
        tracer = self._tracer
        with NO_SPAN if tracer is None else tracer.request("pull", run, self._clock()) as traced:
            try:
                return self._read(run, timeout_s, read, traced)
            except TooEarly:
                waited_s = self._wait_for_version(run.least_version, min(timeout_s, self._version_wait_s))
            return self._read(run, timeout_s, read, traced, waited_s)

    def _read(
        self,
        run: PullRun,
        timeout_s: float,
        read: Callable[[Weights], _Result],
        traced: RequestSpan | None,
        waited_s: float = 0.0,
    ) -> _Result:
        if self.draining:
            raise self._stopping()
        with self._host.lock.held(timeout_s):
            shard = self._host.shard
            began_s, version = self._clock(), shard.updates.version
            if traced is not None:
                traced.began_s = began_s
            try:
                weights = shard.pull(run)
                if waited_s:
                    weights = weights._replace(waited_s=waited_s)
                if shard.updates.version != version:
                    self._weights_moved(shard, began_s, traced)
                if traced is not None:
                    traced.read(weights)
                result = read(weights)
                self._host.after_request(shard, self._clock() - began_s)
            finally:
                shard.record.pull_s += self._clock() - began_s
        failpoints.hit("shard.pull.read")
        return result

    def _wait_for_version(self, version: int, timeout_s: float) -> float:
        """Wait until the weights have reached a version, and return for how long."""
        began_s = self._clock()
        with self._moved:
            if self._waiting >= WAITING_MAX:
                raise QueueFull(f"{self._waiting} pulls wait for a version of this shard already")
            self._waiting += 1
            try:
                self._moved.wait_for(lambda: self._version >= version, timeout_s)
            finally:
                self._waiting -= 1
        return self._clock() - began_s

    def _weights_moved(self, shard: Shard, began_s: float, traced: RequestSpan | None) -> None:
        """Record a request that updated the weights: a push, in sync mode the first request for the next round."""
        with self._moved:
            self._version = shard.updates.version
            self._moved.notify_all()
        took_s = self._clock() - began_s
        shard.record.applied_in(took_s)
        if traced is not None:
            traced.applied(shard.identity.shard, shard.updates.version, shard.updates.round, took_s)
        if shard.tables is not None:
            self._changed(shard.tables.changes)

    def _changed(self, changes: tuple[int, int]) -> None:
        """Hit the failpoints of changes in tables."""
        grown, ended = (now != before for now, before in zip(changes, self._changes, strict=True))
        self._changes = changes
        if grown:
            failpoints.hit("shard.rows.grown")
        if ended:
            failpoints.hit("shard.rows.ended")

    def _stopping(self) -> NotReady:
        return NotReady(f"shard {self._host.shard.identity.shard} is stopping")
