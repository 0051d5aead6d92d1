"""Log events as readable lines: the time, a sentence, the remaining fields.

Has sentences for the commonest events of a worker and a server, and prints any other event by its name and fields.
Called by `parashard.process.shell`, for `parashard worker` and `parashard serve`; services log fields only, for
programs.
"""

from __future__ import annotations

from datetime import datetime

from parashard.process.logs import Event

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
    """Return an event as one line, and a traceback below it where there is one."""
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
