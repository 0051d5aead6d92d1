"""The status page as HTML, and the JSON from which its script redraws it: texts, tables, plots. It is read-only.

The HTML, rendered from `static/page.html`, has the whole status, for browsers without scripts; with scripts
`static/page.js` keeps it up to date. Both show the texts of `screen_of`, so that a figure has one name and one format
on every screen. Knows neither core nor socket.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from parashard._proto import coordinator_pb2 as pb
from parashard.display.status_tables import (
    HELD_OUT,
    TRAINING,
    TRAINING_LOSS,
    figures_of,
    metric_figures,
    shard_columns,
    state_of,
    status_dict,
    table_columns,
    worker_columns,
)
from parashard.display.text_table import Column
from parashard.figures import count, duration, percent
from parashard.telemetry.http import Page
from parashard_coordinator.endpoints import history as points
from parashard_coordinator.endpoints.history import Timeline

FOLDER = Path(__file__).parents[1] / "static"
_PAGE = (FOLDER / "page.html").read_text()
"""The page's template; names in braces are replaced by the texts of `screen_of`."""


def status_page(status: pb.GetStatusReply) -> bytes:
    """Return the page as UTF-8 HTML; without scripts it reloads every two seconds."""
    screen = screen_of(status)
    html = _PAGE.format(
        title=escape(screen["title"]),
        heading=escape(screen["heading"]),
        reason=escape(screen["reason"]),
        problems=_items(screen["problems"]),
        complete=status.steps_complete,
        total=max(1, status.steps_total),
        figures="".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in screen["figures"]
        ),
        workers=_table("workers", screen["workers"]),
        shards=_table("shards", screen["shards"]),
        tables=_table("tables", screen["tables"]),
        no_tables="" if screen["tables"]["rows"] else " hidden",
        events=_items(screen["events"]),
    )
    return html.encode()


def screen_of(status: pb.GetStatusReply) -> dict[str, Any]:
    """Return a status as the page's texts, with the names and formats of all screens."""
    state = state_of(status)
    done = percent(status.steps_complete / status.steps_total) if status.steps_total else "-"
    figures = [
        ("steps", f"{count(status.steps_complete)} of {count(status.steps_total)}"),
        ("steps leased", count(status.steps_leased)),
        ("time", duration(status.elapsed_s)),
        *figures_of(status),
    ]
    return {
        "title": f"{done} {status.job}: {state} - parashard",
        "heading": f"{status.job}: {state}",
        "reason": " \u00b7 ".join(text for text in (status.reason, status.consistency) if text),
        "problems": list(status.problems),
        "progress": [status.steps_complete, max(1, status.steps_total)],
        "figures": [list(figure) for figure in figures],
        "workers": _screen_table(worker_columns(status.workers), [worker.live for worker in status.workers]),
        "shards": _screen_table(shard_columns(status.shards), [shard.live for shard in status.shards]),
        "tables": _screen_table(tables := table_columns(status.tables), [True] * len(tables[0].cells)),
        "events": list(reversed(status.events)),
    }


def status_json(status: pb.GetStatusReply) -> dict[str, Any]:
    """Return the object of /status.json: that of `parashard status --json`, with the page's texts as `screen`."""
    return status_dict(status) | {"screen": screen_of(status)}


def history_json(timeline: Timeline, since: int, run_id: str, coordinator: int) -> dict[str, Any]:
    """Return the object of /history.json: the points after `since`, as columns, and the page's plots."""
    # Points are numbered by each coordinator: for another `coordinator` the numbers begin again.
    metrics = [*timeline.metrics(points.TRAINING), *timeline.metrics(points.HELD_OUT)]
    plots = plots_of(metrics)
    names = dict.fromkeys([*points.FIGURES, *metrics])
    return {
        "run_id": run_id,
        "coordinator": coordinator,
        "last": timeline.last,
        "complete": timeline.complete,
        "begins": duration(timeline.begins_s or 0.0),
        "plots": plots,
        "columns": points.columns(timeline.since(since), list(names)),
    }


def plots_of(metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Return the plots, each with a title and lines; a line is a column of the history with a name."""
    # A metric of both training and evaluations is one plot with two lines.
    plots: dict[str, list[dict[str, str]]] = {"loss": [_line("training_loss", TRAINING_LOSS)]}
    for key in metrics:
        prefix, _, name = key.partition(".")
        of = TRAINING if f"{prefix}." == points.TRAINING else HELD_OUT
        shown = metric_figures([(name, 0.0)], of)[0][0]
        plots.setdefault(shown.removeprefix(f"{of} "), []).append(_line(key, shown))
    return [
        *(_plot(title, lines) for title, lines in plots.items()),
        _plot("throughput", [_line("examples_per_s", "examples/s")], from_zero=True),
        _plot(  # without the maximum, whose scale would make these flat
            "staleness in pushes", [_line(f"staleness_{name}", name) for name in ("p50", "p95")], from_zero=True
        ),
        _plot(
            "workers and shards",
            [_line("workers_live", "workers"), _line("shards_live", "shards")],
            from_zero=True,
            stepped=True,
        ),
        _plot("steps", [_line("steps_complete", "steps complete")], from_zero=True),
    ]


def _plot(title: str, lines: list[dict[str, str]], *, from_zero: bool = False, stepped: bool = False) -> dict[str, Any]:
    return {"title": title, "lines": lines, "from_zero": from_zero, "stepped": stepped}


def _line(column: str, name: str) -> dict[str, str]:
    return {"column": column, "name": name}


def _screen_table(columns: Sequence[Column], live: Sequence[bool]) -> dict[str, Any]:
    return {
        "titles": [column.title for column in columns],
        "is_text": [column.is_text for column in columns],
        "rows": [list(cells) for cells in zip(*(column.cells for column in columns), strict=True)],
        "live": list(live),
    }


def _table(name: str, table: dict[str, Any]) -> str:
    kinds = [' class="text"' if is_text else "" for is_text in table["is_text"]]
    titles = "".join(
        f'<th scope="col"{kind}>{escape(title)}</th>' for title, kind in zip(table["titles"], kinds, strict=True)
    )
    rows = []
    for cells, live in zip(table["rows"], table["live"], strict=True):
        first = f'<th scope="row" class="text">{escape(cells[0])}</th>'
        rest = "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(cells[1:], kinds[1:], strict=True))
        down = "" if live else ' class="down"'
        rows.append(f"<tr{down}>{first}{rest}</tr>")
    return f'<table id="{name}"><thead><tr>{titles}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


STATIC = {
    "icon.svg": "image/svg+xml",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "uplot/uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uplot/uPlot.min.css": "text/css; charset=utf-8",
}
"""Every served file under `static/`, and its type."""

Status = Callable[[], pb.GetStatusReply]
History = Callable[[int], dict[str, Any]]
"""Takes the number of the client's last point; returns the object of /history.json."""


def status_pages(status: Status, history: History) -> dict[str, Page]:
    """Return the handlers by path; static files are read now."""

    def history_object(query: str) -> tuple[int, str, bytes]:
        since = _since(query)
        if since is None:
            return (
                400,
                "text/plain",
                b"history.json takes since=NUMBER, the last point that you have, and nothing else\n",
            )
        return _json(history(since))

    served = {f"/static/{name}": _file(kind, (FOLDER / name).read_bytes()) for name, kind in STATIC.items()}
    return {
        "/": lambda query: (200, "text/html; charset=utf-8", status_page(status())),
        "/status.json": lambda query: _json(status_json(status())),
        "/history.json": history_object,
        **served,
    }


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
