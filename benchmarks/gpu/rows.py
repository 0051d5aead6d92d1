"""Rows of measurements on a GPU, and their tables: a figure of ours, one of a peer, and the ratio of speeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables import table
from parashard_coordinator.core.membership import PHASES

Row = dict[str, Any]
"""`table`, `case`; `peer`, `unit`, `ours`, `its`, `ratio` (our speed over its) and `goal`; or `why` there is none."""

RATE, TIME, SHARE = "examples/s", "ms", "share"
PHASES_TABLE = "A worker's step, ms of its loop"


def row(of: str, case: str, peer: str, unit: str, figures: tuple[Sequence[float], Sequence[float]]) -> Row:
    """Return a row of medians: of ours and of the peer's figures."""
    ours, its = map(statistics.median, figures)
    ratio = its / ours if unit == TIME else ours / its
    return {"table": of, "case": case, "peer": peer, "unit": unit, "ours": ours, "its": its, "ratio": ratio}


def missing(of: str, case: str, why: str) -> Row:
    """Return the row of a case that was not measured."""
    return {"table": of, "case": case, "why": why}


def sections(rows: Sequence[Row], about: str) -> dict[str, str]:
    """Return the tables as Markdown by heading; the first text names the GPU."""
    found = {"GPU": about}
    for of in dict.fromkeys(one["table"] for one in rows):
        lines = [_line(one) for one in rows if one["table"] == of]
        found[of] = table(("case", "ours", "against", "its", "our speed over its", "goal"), lines)
    phases = [one for one in rows if one.get("phases_ms")]
    if phases:
        lines = [[f"{one['table']}: {one['case']}", *_times(one["phases_ms"])] for one in phases]
        found[PHASES_TABLE] = table(("case", *PHASES), lines)
    return found


def below_goal(one: Row) -> bool:
    """Tell whether a row was measured and has a goal that it does not reach."""
    return one.get("goal") is not None and "ratio" in one and not one["ratio"] >= one["goal"]


def _line(one: Row) -> list[str]:
    goal = "" if one.get("goal") is None else f"{one['goal']:g}"
    if "why" in one:
        return [one["case"], one["why"].replace("|", "/"), "", "", "", goal]
    return [one["case"], _shown(one["ours"], one), one["peer"], _shown(one["its"], one), f"{one['ratio']:.2f}", goal]


def _shown(figure: float, one: Row) -> str:
    return f"{figure:,.0f} {RATE}" if one["unit"] == RATE else f"{figure:.3f} {one['unit']}".removesuffix(f" {SHARE}")


def _times(phases_ms: Mapping[str, float]) -> list[str]:
    return [f"{phases_ms.get(phase, 0.0):.2f}" for phase in PHASES]
