"""Paths of the coordinator's HTTP port: the status page, the JSON behind it, and files of a fixed list.

Knows neither the core nor a socket: the run gives it what to ask, `parashard.telemetry.http` asks it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from parashard._proto import coordinator_pb2 as pb
from parashard.telemetry.http import Page
from parashard_coordinator.endpoints.page import status_json, status_page

STATIC = {
    "icon.svg": "image/svg+xml",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "uplot/uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uplot/uPlot.min.css": "text/css; charset=utf-8",
}
"""Every file under `static/` that is served, and its type."""

Status = Callable[[], pb.GetStatusReply]
History = Callable[[int], dict[str, Any]]
"""Takes the number of the last point that the asker has; returns the object of /history.json."""


def status_pages(status: Status, history: History) -> dict[str, Page]:
    """Return what answers at each path; the files are read now."""

    def page(query: str) -> tuple[int, str, bytes]:
        return 200, "text/html; charset=utf-8", status_page(status())

    def status_object(query: str) -> tuple[int, str, bytes]:
        return _json(status_json(status()))

    def history_object(query: str) -> tuple[int, str, bytes]:
        since = _since(query)
        if since is None:
            return (
                400,
                "text/plain",
                b"history.json takes since=NUMBER, the last point that you have, and nothing else\n",
            )
        return _json(history(since))

    folder = Path(__file__).parents[1] / "static"
    served = {f"/static/{name}": _file(kind, (folder / name).read_bytes()) for name, kind in STATIC.items()}
    return {"/": page, "/status.json": status_object, "/history.json": history_object, **served}


def _since(query: str) -> int | None:
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=1) if query else []
    except ValueError:
        return None
    for name, value in given:
        return int(value) if name == "since" and re.fullmatch("[0-9]{1,18}", value) else None
    return 0


def _json(content: dict[str, Any]) -> tuple[int, str, bytes]:
    return 200, "application/json", json.dumps(content, allow_nan=False).encode()


def _file(kind: str, content: bytes) -> Page:
    return lambda query: (200, kind, content)
