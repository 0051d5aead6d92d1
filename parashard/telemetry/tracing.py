"""Whether a process traces, and its tracer if it does.

Owns what `--trace` may be, and that OpenTelemetry is loaded only by processes that trace: `parashard.telemetry.tracer`
imports it, and is imported here, on demand. Called by the services' `__main__`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from parashard.errors import ConfigurationError
from parashard.process.arguments import TRACE_VARIABLE
from parashard.process.extras import install

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")


@contextmanager
def tracing(trace: str, role: str, instance: str) -> Iterator[Tracer | None]:
    """Have the tracer of a service, which is closed with the last of its spans; None: it does not trace.

    Parameters
    ----------
    trace : str
        What `--trace` or its environment variable says.
    role : str
        "coordinator", "shard" or "worker".
    instance : str
        Which one of them; empty: it has no name.

    Raises
    ------
    ConfigurationError
        If `trace` is no yes and no no, the packages are missing, or OpenTelemetry's own variables are not right.
    """
    if trace.lower() in OFF:
        yield None
        return
    if trace.lower() not in ON:
        raise ConfigurationError(
            f"environment {TRACE_VARIABLE}: found {trace!r}; allowed: {', '.join(ON)}; {', '.join(OFF[1:])} or nothing"
        )
    try:
        from parashard.telemetry import tracer
    except ImportError as error:
        raise ConfigurationError(f"--trace: {error.name} is not installed: {install('otel')}") from None
    opened = tracer.from_environment(role, instance)
    try:
        yield opened
    finally:
        opened.close()
