"""The status page: one HTML page without scripts, rendered from the status. It shows; it has no button."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from parashard.metric_text import metric_name, metric_value
from parashard.transfer import Bytes, Overlap, percent
from protos import coordinator_pb2 as pb

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2733; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 1.6rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: right; padding: .25rem .6rem; }
th:first-child, td:first-child { text-align: left; } thead { border-bottom: 2px solid #c8d1da; }
tbody tr:nth-child(even) { background: #f4f6f8; } .away { color: #a33; } progress { width: 100%; height: 1.1rem; }
pre { background: #f4f6f8; padding: .7rem; overflow-x: auto; }
"""


def status_page(status: pb.GetStatusReply) -> bytes:
    """Return the page as UTF-8 HTML that reloads itself every two seconds."""
    state = pb.JobState.Name(status.state).removeprefix("JOB_STATE_").lower()
    figures = [
        ("steps", f"{status.steps_complete:,} of {status.steps_total:,}"),
        ("examples/s", f"{status.examples_per_s:,.0f}"),
        ("loss", f"{status.loss:.4f}" if status.HasField("loss") else "none yet"),
        *((f"held-out {metric_name(name)}", metric_value(value)) for name, value in sorted(status.metrics.items())),
        ("staleness p50 / p95 / max", f"{status.staleness_p50} / {status.staleness_p95} / {status.staleness_max}"),
        ("step lag max", str(status.step_lag_max)),
        ("transfer hidden", percent(Overlap.of(worker.phases for worker in status.workers).hidden)),
        ("bytes saved", percent(Bytes.of(shard.record for shard in status.shards).saved)),
        ("leased steps", str(status.steps_leased)),
        ("elapsed", f"{status.elapsed_s:.0f} s"),
    ]
    workers = [
        (
            worker.name,
            worker.device if worker.live else "away",
            f"{worker.steps_complete:,}",
            f"{worker.examples_per_s:,.0f}",
            str(worker.steps_held),
            str(worker.restarts),
        )
        for worker in status.workers
    ]
    shards = [
        (
            f"shard-{shard.shard}",
            shard.address or "not registered",
            f"{shard.record.version:,}",
            f"{shard.record.duplicate_pushes:,}",
            f"{shard.record.variable_bytes / 2**20:.1f}",
            f"{shard.record.push_bytes / 2**20:,.0f}",
        )
        for shard in status.shards
    ]
    body = [
        f"<h1>{escape(status.job)}: {state}</h1><p>{escape(status.reason)} &middot; {escape(status.consistency)}</p>",
        f'<progress value="{status.steps_complete}" max="{max(1, status.steps_total)}"></progress>',
        _table(("", ""), figures),
        "<h2>Workers</h2>",
        _table(("worker", "device", "steps", "examples/s", "held", "restarts"), workers),
        "<h2>Shards</h2>",
        _table(("shard", "address", "version", "duplicates", "MiB held", "MiB pushed"), shards),
        "<h2>Events</h2>",
        f"<pre>{escape(chr(10).join(reversed(status.events)))}</pre>",
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
        f"<title>{escape(status.job)} - parashard</title><style>{_STYLE}</style><body>{''.join(body)}</body></html>"
    ).encode()


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head) if any(head) else ""
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
