"""The worker's spans: a step from its lease to its end, and in it every pull, the computation, and every push.

Subclasses of what the step loop uses: a worker that does not trace has the plain ones and never imports this. Called by
`parashard_worker.__main__`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context

from parashard._proto import coordinator_pb2 as pb
from parashard.client.shard_client import Pulled, Pushed, ShardClient
from parashard.plan.variables import Float32s
from parashard.protocol.buffers import Buffers
from parashard.protocol.messages import PullRun, Push, Receipt
from parashard.telemetry.tracer import Attributes, Tracer, traceparent
from parashard.transports.base import Connect, Greeting, Pending, ShardAddress, Transport
from parashard_worker.leased import Work
from parashard_worker.leasing import Leasing


class StepSpans:
    """The spans of the steps in the works, by step.

    Parameters
    ----------
    tracer : Tracer
        Makes them.
    run_id, worker : str
        Whose they are.
    """

    def __init__(self, tracer: Tracer, run_id: str, worker: str) -> None:
        self._tracer = tracer
        self._run_id = run_id
        self._worker = worker
        self._spans: dict[int, Span] = {}

    def begin(self, grant: pb.Grant) -> None:
        """Begin a step that was taken from the queue."""
        about: Attributes = {"parashard.worker": self._worker, "parashard.skip": grant.skip}
        self._spans[grant.step] = self._tracer.of_step(
            "step", self._run_id, grant.step, parent=grant.traceparent, attributes=about
        )

    def end(self, step: int, outcome: str, reason: str = "", **about: float) -> None:
        """End a step: "completed", "failed" (with the reason) or "dropped"."""
        span = self._spans.pop(step, None)
        if span is None:
            return
        span.set_attributes(
            {"parashard.outcome": outcome, **{f"parashard.{key}": value for key, value in about.items()}}
        )
        if reason:
            span.set_status(StatusCode.ERROR, reason)
        span.end()

    def phase(self, name: str, step: int | None, kind: SpanKind = SpanKind.INTERNAL) -> AbstractContextManager[Span]:
        """Be in a phase of a step; what is for no step, an evaluation's pull, has a trace of its own."""
        span = None if step is None else self._spans.get(step)
        parent = Context() if span is None else set_span_in_context(span, Context())
        about: Attributes = {"parashard.worker": self._worker}
        if step is not None:
            about["parashard.step"] = step
        return self._tracer.within(name, parent, kind=kind, attributes=about)


class TracedLeasing(Leasing):
    """Leases whose steps have spans; the arguments are those of `Leasing` after the first."""

    def __init__(self, spans: StepSpans, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._spans = spans

    def take(self, timeout_s: float) -> Work | None:
        work = super().take(timeout_s)
        if isinstance(work, pb.Grant):
            self._spans.begin(work)
        return work

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        step = work.step if isinstance(work, pb.Grant) else None
        with self._spans.phase("compute", step), super().computing(work):
            yield

    def completed(self, step: pb.CompletedStep) -> None:
        super().completed(step)
        self._spans.end(step.step, "completed", loss=step.loss, examples=step.examples)

    def failed(self, step: int, reason: str, kind: pb.FailureKind = pb.FAILURE_KIND_UNSPECIFIED) -> None:
        super().failed(step, reason, kind)
        self._spans.end(step, "failed", reason)

    def dropped(self, step: int) -> None:
        super().dropped(step)
        self._spans.end(step, "dropped")


class TracedClient(ShardClient):
    """A client whose pulls and pushes are spans, which the shards' are below, over all retries."""

    def __init__(self, spans: StepSpans, *arguments: Any, connect: Connect, **more: Any) -> None:
        super().__init__(*arguments, connect=lambda where, greeting: _Carrying(connect, where, greeting), **more)
        self._spans = spans

    def pull(self, *, step: int | None = None, round_: int | None = None) -> Pulled:
        with self._spans.phase("pull", step, SpanKind.CLIENT):
            return super().pull(step=step, round_=round_)

    def push(
        self, step: int, gradients: Mapping[str, Float32s], pulled: Pulled | None, *, skipped: bool = False
    ) -> Pushed:
        with self._spans.phase("push", step, SpanKind.CLIENT) as span:
            pushed = super().push(step, gradients, pulled, skipped=skipped)
            span.set_attribute("parashard.results", [receipt.result.name.lower() for receipt in pushed.receipts])
            known = [receipt.staleness for receipt in pushed.receipts if receipt.staleness is not None]
            if known:
                span.set_attribute("parashard.staleness", max(known))
            return pushed


class _Carrying:
    """A transport whose requests carry the current span's context."""

    def __init__(self, connect: Connect, where: ShardAddress, greeting: Greeting) -> None:
        self._inner: Transport = connect(where, greeting)

    def push(self, push: Push, deadline_s: float) -> Pending[Receipt]:
        return self._inner.push(replace(push, traceparent=traceparent()), deadline_s)

    def pull(self, run: PullRun, into: Buffers, deadline_s: float) -> Pending[int]:
        return self._inner.pull(replace(run, traceparent=traceparent()), into, deadline_s)

    def close(self) -> None:
        self._inner.close()
