"""The shard's spans: each request with a worker's trace context, and in it the apply, if the weights changed.

Made by `parashard_server.__main__`, if the shard traces; no other imports this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from parashard.protocol.messages import PullRun, Push, Receipt, Target, Weights
from parashard.telemetry.observing import ObservedRequest, RequestObserver
from parashard.telemetry.tracer import Attributes, Tracer, sender


class RequestSpans(RequestObserver):
    """Makes requests spans, where they come with a context.

    Parameters
    ----------
    tracer : Tracer
        Makes them.
    clock : callable
        The handler's.
    """

    def __init__(self, tracer: Tracer, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer = tracer
        self._clock = clock

    def push(self, push: Push, arrived_s: float) -> ObservedRequest:
        parent = sender(push.traceparent)
        if parent is None:
            return super().push(push, arrived_s)
        about: Attributes = {"parashard.worker": push.worker, "parashard.bytes": push.payload.nbytes}
        return self._request("push", parent, push.target, push.step, arrived_s, about)

    def pull(self, run: PullRun, arrived_s: float) -> ObservedRequest:
        parent = sender(run.traceparent)
        if parent is None:
            return super().pull(run, arrived_s)
        return self._request("pull", parent, run.target, run.step, arrived_s, {})

    def _request(
        self, name: str, parent: Context, target: Target, step: int | None, arrived_s: float, more: Attributes
    ) -> ObservedRequest:
        about: Attributes = {
            "rpc.system.name": "parashard",
            "rpc.method": f"parashard.v1.ShardData/{name.capitalize()}",
            "parashard.run": target.run_id,
            "parashard.shard": target.shard,
            "parashard.incarnation": target.incarnation,
            **more,
        }
        if step is not None:
            about["parashard.step"] = step
        within = self._tracer.within(name, parent, kind=SpanKind.SERVER, attributes=about)
        return _RequestSpan(self._tracer, within, step, arrived_s, self._clock)


class _RequestSpan(ObservedRequest):
    """A request as a span; what happened under the lock is told after it, since others wait."""

    def __init__(
        self,
        tracer: Tracer,
        within: AbstractContextManager[Span],
        step: int | None,
        arrived_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._tracer = tracer
        self._within = within
        self._step = step
        self._arrived_s = arrived_s
        self._clock = clock
        self._began_s: float | None = None  # None: it has not got the lock
        self._applied: tuple[float, Attributes] | None = None

    def __enter__(self) -> Self:
        self._span = self._within.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._began_s is not None:
            self._span.set_attribute("parashard.turn_wait_s", self._began_s - self._arrived_s)
            if self._applied is not None:
                ended_s, about = self._applied
                since_ns = time.time_ns() - round(1e9 * self._clock())
                began_ns, ended_ns = since_ns + round(1e9 * self._began_s), since_ns + round(1e9 * ended_s)
                self._tracer.past("apply", began_ns, ended_ns, about)
        self._within.__exit__(*error)  # type: ignore[arg-type]

    def began(self, at_s: float) -> None:
        self._began_s = at_s

    def applied(self, at_s: float, shard: int, version: int, round_: int | None) -> None:
        about: Attributes = {"parashard.shard": shard, "parashard.version": version}
        if round_ is not None:
            about["parashard.round"] = round_ - 1  # by whichever request names the next one
        elif self._step is not None:
            about["parashard.step"] = self._step
        self._applied = at_s, about

    def answered(self, receipt: Receipt) -> None:
        self._span.set_attributes(
            {"parashard.result": receipt.result.name.lower(), "parashard.version": receipt.version}
        )
        if receipt.staleness is not None:
            self._span.set_attribute("parashard.staleness", receipt.staleness)

    def read(self, weights: Weights) -> None:
        size_bytes = sum(run.values.nbytes for run in weights.runs)
        size_bytes += sum(rows.values.nbytes for rows in weights.rows.values())
        self._span.set_attributes({"parashard.version": weights.version, "parashard.bytes": size_bytes})
