"""Open the tracer of a process, if it traces.

Code that may trace takes a `Tracer | None` and imports only this module: OpenTelemetry is loaded only by processes that
trace.
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
"""Entered in place of a span by a process that does not trace."""

ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")


@contextmanager
def tracing(trace: str, role: str, instance: str) -> Iterator[Tracer | None]:
    """Open the tracer of a service for a block, and close it with the last spans; None if it does not trace."""
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
