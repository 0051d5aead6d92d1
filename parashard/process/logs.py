"""The log: `log.info("shard-lost", shard=3)` writes an event and its fields.

On the standard library's logging, in one logger, `parashard`. Without configuration, as in interactive commands,
events go nowhere: a command's output is not a log. `configure_logging`, which `parashard.process.shell` calls, writes
them to a stream, with other libraries' warnings in the same format. `as_text` writes them for people, with sentences
for the commonest events of a worker and a server.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from parashard.process.best_effort import lossy

Event = dict[str, Any]
"""One line of a log: timestamp, level and event, then its fields, and a traceback as `exception`."""

_bound: ContextVar[Event] = ContextVar("_bound", default={})  # noqa: B039  # never changed, only replaced


class EventLog(logging.LoggerAdapter[logging.Logger]):
    """Takes an event's name and, as keyword arguments, its fields; `exc_info` as in the standard library."""

    def process(self, msg: str, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """Return the logger's arguments; the fields are in a separate dict, because they may have any name."""
        error = kwargs.pop("exc_info", None)
        return msg, {"exc_info": error, "extra": {"fields": {**_bound.get(), **kwargs}}}


log = EventLog(logging.getLogger("parashard"))
log.setLevel(logging.INFO)
log.logger.addHandler(logging.NullHandler())


@contextmanager
def bound(**fields: object) -> Iterator[None]:
    """Add these fields to each event of this thread."""
    token = _bound.set({**_bound.get(), **fields})
    try:
        yield
    finally:
        _bound.reset(token)


def configure_logging(stream: TextIO, render: Callable[[Event], str]) -> None:
    """Write a line for each event of ours, and for each warning of other libraries."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_EventFormatter(render))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


@contextmanager
def logged_to(path: Path, render: Callable[[Event], str]) -> Iterator[None]:
    """Write our events to a file, too, in a process with its own logging; do nothing if the file cannot be opened."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a")
    except OSError:
        yield
        return
    handler = logging.StreamHandler(lossy(stream, "log lines"))
    handler.setFormatter(_EventFormatter(render))
    log.logger.addHandler(handler)
    try:
        yield
    finally:
        log.logger.removeHandler(handler)
        stream.close()


def as_logfmt(event: Event) -> str:
    """Return an event as `key=value key="two words"`; None is empty, and True the key alone."""
    return " ".join(key if value is True else f"{key}={_logfmt_value(value)}" for key, value in event.items())


def as_json(event: Event) -> str:
    """Return an event as a JSON object; a value that JSON does not have is written as its `repr`."""
    return json.dumps(event, default=repr)


def event_of(record: logging.LogRecord) -> Event:
    """Return a record's event; one of another library has the name of its logger as a field."""
    at = datetime.fromtimestamp(record.created, UTC)
    event = {
        "timestamp": f"{at:%Y-%m-%dT%H:%M:%S.%fZ}",
        "level": record.levelname.lower(),
        "event": record.getMessage(),
    }
    return event | getattr(record, "fields", {"logger": record.name})


class _EventFormatter(logging.Formatter):
    def __init__(self, render: Callable[[Event], str]) -> None:
        super().__init__()
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        event = event_of(record)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return self._render(event)


def _logfmt_value(value: object) -> str:
    if value is None:
        return ""
    text = str(value).lower() if value is False else str(value)
    quoted = any(character in text for character in ' ="')
    if quoted:
        text = text.replace("\\", "\\\\")
    text = text.replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"' if quoted else text


_WORDS = {
    "joined": "joined as {worker} ({device}, {threads} threads)",
    "joined-again": "joined again as {worker}",
    "left": "left: {reason}",
    "waiting": "waiting for at most {at_most_s:.0f} s: {why}",
    "waiting-without-end": "waiting: {why}",
    "giving-up": "giving up: no answer from {coordinator} for {away_s:.0f} s",
    "transport": "shard {shard} by {kind}",
    "published": "serving {versions}",
    "not-published": "nothing newer is served: {problem}",
}
_CONTEXT = ("worker", "incarnation", "timestamp", "level", "event", "exception")
"""Fields that every line has, or that have their own format."""


def as_text(event: Event) -> str:
    """Return an event as one line, with its traceback below, if any."""
    name, level = str(event.get("event", "")), str(event.get("level", "info"))
    try:
        words = _WORDS[name].format_map(event)
    except (KeyError, ValueError):  # another event, or one without the fields of its sentence
        fields = ", ".join(f"{key} {value}" for key, value in event.items() if key not in _CONTEXT)
        words = name.replace("-", " ") + (f": {fields}" if fields else "")
    mark = "" if level == "info" else f"{level}: "
    trace = f"\n{event['exception']}" if event.get("exception") else ""
    return f"{_local_time(str(event.get('timestamp', '')))} {mark}{words}{trace}"


def _local_time(timestamp: str) -> str:
    """Return hours, minutes and seconds of an ISO timestamp in local time."""
    try:
        return f"{datetime.fromisoformat(timestamp).astimezone():%H:%M:%S}"
    except ValueError:
        return timestamp
