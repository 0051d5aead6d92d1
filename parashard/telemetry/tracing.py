"""Whether a process traces, and its tracer if it does.

What may trace takes a `Tracer | None` and imports this alone: OpenTelemetry is loaded only by processes that trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from parashard.errors import ConfigurationError
from parashard.process.extras import install
from parashard.process.starts import TRACE_VARIABLE

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

NO_SPAN = nullcontext()
"""What a process that does not trace enters in place of a span."""

ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")


@contextmanager
def tracing(trace: str, role: str, instance: str) -> Iterator[Tracer | None]:
    """Have the tracer of a service, which is closed with the last of its spans; None: it does not trace."""
    if trace.lower() in OFF:
        yield None
        return
    if trace.lower() not in ON:
        raise ConfigurationError(
            f"environment {TRACE_VARIABLE}: found {trace!r}; allowed: {', '.join(ON)}; {', '.join(OFF[1:])} or nothing"
        )
    try:
        from parashard.telemetry.exporters import tracer_from_environment
    except ImportError as error:
        raise ConfigurationError(f"--trace: {error.name} is not installed: {install('otel')}") from None
    opened = tracer_from_environment(role, instance)
    try:
        yield opened
    finally:
        opened.close()
