"""The status page: one HTML page without scripts, rendered from the status. It shows; it has no button."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from parashard._proto import coordinator_pb2 as pb
from parashard.display.columns import Column
from parashard.display.figures import count, duration
from parashard.display.status_tables import figures_of, shard_columns, state_of, worker_columns

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2733; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 1.6rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: right; padding: .25rem .6rem; }
th:first-child, td:first-child { text-align: left; } thead { border-bottom: 2px solid #c8d1da; }
tbody tr:nth-child(even) { background: #f4f6f8; } .problem { color: #a33; }
progress { width: 100%; height: 1.1rem; }
pre { background: #f4f6f8; padding: .7rem; overflow-x: auto; }
"""


def status_page(status: pb.GetStatusReply) -> bytes:
    """Return the page as UTF-8 HTML that reloads itself every two seconds."""
    figures = [
        ("steps", f"{count(status.steps_complete)} of {count(status.steps_total)}"),
        ("steps leased", count(status.steps_leased)),
        ("time", duration(status.elapsed_s)),
        *figures_of(status),
    ]
    body = [
        f"<h1>{escape(status.job)}: {state_of(status)}</h1>",
        f"<p>{escape(status.reason)} &middot; {escape(status.consistency)}</p>",
        *(f'<p class="problem">{escape(problem)}</p>' for problem in status.problems),
        f'<progress value="{status.steps_complete}" max="{max(1, status.steps_total)}"></progress>',
        _table([Column("", tuple(name for name, _ in figures)), Column("", tuple(value for _, value in figures))]),
        "<h2>Workers</h2>",
        _table(worker_columns(status.workers)),
        "<h2>Shards</h2>",
        _table(shard_columns(status.shards)),
        "<h2>Events</h2>",
        f"<pre>{escape(chr(10).join(reversed(status.events)))}</pre>",
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
        f"<title>{escape(status.job)} - parashard</title><style>{_STYLE}</style><body>{''.join(body)}</body></html>"
    ).encode()


def _table(columns: Sequence[Column]) -> str:
    titles = "".join(f"<th>{escape(column.title)}</th>" for column in columns) if columns[0].title else ""
    rows = zip(*(column.cells for column in columns), strict=True)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"
