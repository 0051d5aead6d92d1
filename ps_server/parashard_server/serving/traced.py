"""The shard's spans: each request that came with a worker's context, and in it the apply, where the weights moved.

A subclass of what the services call: a shard that does not trace has the plain one and never imports this. Called by
`parashard_server.__main__`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from parashard.protocol.messages import PullRun, Push, Receipt, Target, Weights
from parashard.telemetry.tracer import Attributes, Tracer, sender
from parashard_server.core.shard import Shard
from parashard_server.serving.request_handler import RequestHandler

_Result = TypeVar("_Result")


class _Turn(threading.local):
    """What this thread's present request has come to: moments of the plane's clock."""

    step: int | None = None
    asked_s = 0.0
    began_s: float | None = None  # None: its turn has not come
    applied: tuple[float, Attributes] | None = None  # when the weights had moved, and what is known of it


class TracedRequestHandler(RequestHandler):
    """A plane whose requests are spans; the arguments are those of `RequestHandler` after the first."""

    def __init__(self, tracer: Tracer, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._tracer = tracer
        self._turn = _Turn()

    def push(self, push: Push, timeout_s: float) -> Receipt:
        parent = sender(push.traceparent)
        if parent is None:
            return super().push(push, timeout_s)
        with self._request("push", parent, push.target, push.step) as span:
            span.set_attributes(
                {
                    "parashard.worker": push.worker,
                    "parashard.bytes": push.payload.nbytes,
                }
            )
            receipt = super().push(push, timeout_s)
            span.set_attributes({"parashard.result": receipt.result.name.lower(), "parashard.version": receipt.version})
            if receipt.staleness is not None:
                span.set_attribute("parashard.staleness", receipt.staleness)
            return receipt

    def pull(self, run: PullRun, timeout_s: float, read: Callable[[Weights], _Result]) -> _Result:
        parent = sender(run.traceparent)
        if parent is None:
            return super().pull(run, timeout_s, read)
        with self._request("pull", parent, run.target, run.step) as span:

            def told(weights: Weights) -> _Result:
                span.set_attributes(
                    {
                        "parashard.version": weights.version,
                        "parashard.bytes": sum(r.values.nbytes for r in weights.runs),
                    }
                )
                return read(weights)

            return super().pull(run, timeout_s, told)

    @contextmanager
    def _request(self, name: str, parent: Context, target: Target, step: int | None) -> Iterator[Span]:
        about: Attributes = {
            "rpc.system.name": "parashard",
            "rpc.method": f"parashard.v1.ShardData/{name.capitalize()}",
            "parashard.run": target.run_id,
            "parashard.shard": target.shard,
            "parashard.incarnation": target.incarnation,
        }
        if step is not None:
            about["parashard.step"] = step
        turn = self._turn
        turn.step, turn.asked_s, turn.began_s, turn.applied = step, self._clock(), None, None
        with self._tracer.within(name, parent, kind=SpanKind.SERVER, attributes=about) as span:
            try:
                yield span
            finally:
                if turn.began_s is not None:
                    span.set_attribute("parashard.turn_wait_s", turn.began_s - turn.asked_s)
                    if turn.applied is not None:
                        self._tell_apply(turn.began_s, *turn.applied)

    def _time_apply(self, shard: Shard, version: int, started_s: float) -> None:
        super()._time_apply(shard, version, started_s)
        self._turn.began_s = started_s
        if shard.updates.version != version:
            about: Attributes = {"parashard.shard": shard.identity.shard, "parashard.version": shard.updates.version}
            if shard.updates.round is not None:
                about["parashard.round"] = shard.updates.round - 1  # by whichever request names the next one
            elif self._turn.step is not None:
                about["parashard.step"] = self._turn.step
            self._turn.applied = self._clock(), about

    def _tell_apply(self, began_s: float, ended_s: float, about: Attributes) -> None:
        """Tell what happened in the turn after it: others wait for theirs."""
        since_ns = time.time_ns() - round(1e9 * self._clock())
        self._tracer.past("apply", since_ns + round(1e9 * began_s), since_ns + round(1e9 * ended_s), about)
