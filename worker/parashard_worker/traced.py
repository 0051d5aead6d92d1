"""The worker's spans: a step from its lease to its end, and in it every pull, the computation, and every push.

Made by `parashard_worker.__main__`, if the worker traces; no other imports this.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Self

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context

from parashard._proto import coordinator_pb2 as pb
from parashard.protocol.messages import Receipt
from parashard.telemetry.observing import Observed, Outcome, Phase, StepObserver
from parashard.telemetry.tracer import Attributes, Tracer, traceparent


class StepSpans(StepObserver):
    """The spans of the steps in the works, by step.

    Parameters
    ----------
    tracer : Tracer
        Makes them.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._run_id = self._worker = ""
        self._spans: dict[int, Span] = {}

    def joined(self, run_id: str, worker: str) -> None:
        self._run_id, self._worker = run_id, worker

    def began(self, grant: pb.Grant) -> None:
        about: Attributes = {"parashard.worker": self._worker, "parashard.skip": grant.skip}
        self._spans[grant.step] = self._tracer.of_step(
            "step", self._run_id, grant.step, parent=grant.traceparent, attributes=about
        )

    def ended(self, step: int, outcome: Outcome, reason: str = "", *, loss: float = 0.0, examples: int = 0) -> None:
        span = self._spans.pop(step, None)
        if span is None:
            return
        span.set_attribute("parashard.outcome", outcome)
        if outcome == "completed":
            span.set_attributes({"parashard.loss": loss, "parashard.examples": examples})
        if reason:
            span.set_status(StatusCode.ERROR, reason)
        span.end()

    def phase(self, phase: Phase, step: int | None) -> Observed:
        span = None if step is None else self._spans.get(step)
        # What is for no step, an evaluation's pull, has a trace of its own.
        parent = Context() if span is None else set_span_in_context(span, Context())
        about: Attributes = {"parashard.worker": self._worker}
        if step is not None:
            about["parashard.step"] = step
        kind = SpanKind.INTERNAL if phase == "compute" else SpanKind.CLIENT
        return _PhaseSpan(self._tracer.within(phase, parent, kind=kind, attributes=about))

    def traceparent(self) -> str:
        return traceparent()


class _PhaseSpan(Observed):
    """A part of a step as a span, which is the current one in its context."""

    def __init__(self, within: AbstractContextManager[Span]) -> None:
        self._within = within

    def __enter__(self) -> Self:
        self._span = self._within.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._within.__exit__(*error)  # type: ignore[arg-type]

    def receipts(self, receipts: tuple[Receipt, ...]) -> None:
        self._span.set_attribute("parashard.results", [receipt.result.name.lower() for receipt in receipts])
        known = [receipt.staleness for receipt in receipts if receipt.staleness is not None]
        if known:
            self._span.set_attribute("parashard.staleness", max(known))
