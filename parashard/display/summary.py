"""The summary of a run that has ended: its report as lines, with the names of the live view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from parashard.display.status_tables import (
    REPEATED,
    SAVED,
    TRAINING,
    TRAINING_LOSS,
    TRANSFERS,
    in_words,
    metric_figures,
)
from parashard.figures import count, counted, duration, mebibytes, metric, percent, rate
from parashard.process.run_files import WEIGHTS_FILE, short_path

STATE_STYLES = {"done": "green", "stopped": "yellow"}


def print_summary(report: Mapping[str, Any], run_dir: Path, console: Console, copy: Path | None = None) -> None:
    """Print the figures of a report; a path stays one line, to be copied."""
    for line in summary_lines(report, run_dir, copy):
        console.print(line, soft_wrap=True)


def summary_lines(report: Mapping[str, Any], run_dir: Path, copy: Path | None = None) -> list[Text]:
    """Return the figures of a report, one per line, and where a copy of the weights is."""
    rows = _rows(report, run_dir, copy)
    width = max(len(name) for name, _ in rows)
    state, learned = f"{report['state']}: ", not not_learned(report)
    style = STATE_STYLES.get(report["state"], "red") if learned else "yellow"
    lines = [Text.assemble((f"{report['job']:<{width}}  ", "bold"), (state, style), report["reason"])]
    lines += [Text.assemble((f"{name:<{width}}  ", "dim"), value) for name, value in rows]
    return lines if learned else [*lines, Text(not_learned(report), style="bold yellow")]


def not_learned(report: Mapping[str, Any]) -> str:
    """Return the last line about a run that is done and whose model did not learn; "" of every other run."""
    is_done = report.get("state") == "done"
    text = report.get("not_learned", "") if is_done else ""  # an earlier version's report has none
    return f"done, but the model did not learn: {text}" if text else ""


def _rows(report: Mapping[str, Any], run_dir: Path, copy: Path | None) -> list[tuple[str, str]]:
    staleness, moved, problems = report["staleness"], report["bytes"], report.get("problems", ())
    rows = [
        *(("problem", problem) for problem in problems if problem not in not_learned(report)),
        ("steps", _steps(report["steps_total"], report["steps_applied"])),
        ("throughput", _throughput(report["examples_per_s"], report["wall_s"])),
        *metric_figures((name, value) for name, value in report["held_out"].items() if value is not None),
    ]
    if report["training_loss"] is not None:
        rows.append((TRAINING_LOSS, metric(report["training_loss"])))
    last = (report.get("epochs") or [{}])[-1]  # of an earlier version's report there are none
    shown = ((name, value) for name, value in last.items() if name not in ("epoch", "loss") and value is not None)
    rows += metric_figures(shown, TRAINING)
    if report["skipped_steps"]:
        rows.append(("steps skipped", count(report["skipped_steps"])))
    if report.get("partly_skipped"):
        rows.append(("partly skipped", f"{count(report['partly_skipped'])}, on some of the shards only"))
    p50, p95, most = (count(staleness[name]) for name in ("p50", "p95", "max"))
    rows += [
        ("staleness", f"p50 {p50}, p95 {p95}, max {most} pushes"),
        ("step lag", f"max {count(report['step_lag']['max'])} steps"),
        *_transfers(report["network"]),
        ("traffic", f"{mebibytes(moved['pushed'])} MiB pushed, {mebibytes(moved['pulled'])} MiB pulled"),
        (SAVED, percent(moved["saved_share"])),
        (REPEATED, count(report["duplicate_pushes"])),
    ]
    rows += [(name, count(report[name])) for name in ("ledger_wrong", "rows_wrong", "torn") if name in report]
    if "rows" in report:
        rows.append(("rows of tables", ", ".join(f"{name} {count(number)}" for name, number in report["rows"].items())))
    restarts = [(report[f"{role}_restarts"], role) for role in ("worker", "shard", "coordinator")]
    if any(times for times, _ in restarts):
        rows.append(("restarts", ", ".join(counted(times, role) for times, role in restarts if times)))
    if "weights_sha256" in report:
        rows.append(("weights", short_path(run_dir / WEIGHTS_FILE)))
        if copy is not None:
            rows.append(("copied to", short_path(copy)))
        rows.append(("sha256", report["weights_sha256"][:16]))
    return [*rows, ("run", short_path(run_dir))]


def _throughput(examples_per_s: float | None, wall_s: float) -> str:
    return "not known" if examples_per_s is None else f"{rate(examples_per_s)} examples/s over {duration(wall_s)}"


def _transfers(network: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what transfers take of a step, and what a pipeline would change; an earlier report has neither."""
    if "step_share" not in network:
        return []
    told = in_words(network["step_share"], network["overlapped_share"])
    return [(TRANSFERS, "; ".join(text for text in (told, network["pipeline"]) if text))]


def _steps(total: int, applied: Sequence[int]) -> str:
    least, most = min(applied, default=0), max(applied, default=0)
    if least == most:
        return f"{count(least)} of {count(total)}, applied by every shard"
    return f"{count(least)} to {count(most)} of {count(total)}, applied by the shards"
