"""Dashboards as values, and those values as Grafana's JSON.

`deploy.grafana.draw` reads the same values and draws them without Grafana.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 39  # of Grafana 11; later versions read it
COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 24, 8, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OUR_SERIES = re.compile(r"\b(?:\w+:)?(?:parashard|process|ALERTS)(?:_\w+)?(?::\w+)?\b(?:\{([^}]*)\})?")

Kind = Literal["lines", "stack", "heatmap", "stat"]


@dataclass(frozen=True)
class Query:
    """A PromQL expression and what its series are called, in Grafana's `{{label}}` form."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture."""

    # title, description: what it shows; what to read from it.
    title: str
    description: str
    unit: str  # Grafana's name of the unit: `s`, `bytes`, `Bps`, `percentunit`, `short`, or `suffix: ...`
    queries: tuple[Query, ...]  # what is shown. A heat map has one, whose series are the buckets by `le`
    kind: Kind = "lines"  # lines, lines stacked on each other, a heat map, or one number
    minimum: float | None = 0.0  # where the axis begins; None leaves it to the values


@dataclass(frozen=True)
class Dashboard:
    """Panels under a title. `uid` is its permanent name in links."""

    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]


def of_run(expr: str) -> str:
    """Return an expression in which each series of ours is one of the runs that the reader chose.

    >>> of_run('rate(parashard_shard_pushes_total{result="applied"}[1m]) / DCGM_FI_DEV_GPU_UTIL')
    'rate(parashard_shard_pushes_total{result="applied", run=~"$run"}[1m]) / DCGM_FI_DEV_GPU_UTIL'
    """

    def chosen(series: re.Match[str]) -> str:
        name = series[0].partition("{")[0]
        labels = ", ".join(filter(None, (series[1], 'run=~"$run"')))
        return f"{name}{{{labels}}}"

    return OUR_SERIES.sub(chosen, expr)


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """Return what Grafana loads."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["parashard"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,  # one crosshair over all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable(), _run_variable()]},
        "links": [
            {
                "type": "dashboards",
                "title": "parashard",
                "tags": ["parashard"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "panels": [_panel_json(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _panel_json(number: int, panel: Panel) -> dict[str, Any]:
    in_a_row = COLUMNS // PANEL_WIDTH
    row, column = divmod(number, in_a_row)
    return {
        "id": number + 1,
        "type": {"heatmap": "heatmap", "stat": "stat"}.get(panel.kind, "timeseries"),
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": column * PANEL_WIDTH, "y": row * PANEL_HEIGHT, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "targets": [_target(place, query, panel.kind) for place, query in enumerate(panel.queries)],
        **_look(panel),
    }


def _target(place: int, query: Query, kind: Kind) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + place),
        "datasource": SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "format": "heatmap" if kind == "heatmap" else "time_series",
        "range": True,
    }


def _look(panel: Panel) -> dict[str, Any]:
    """Return the part of a panel that depends on its kind."""
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.kind == "heatmap":
        options = {
            "calculate": False,
            "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
            "cellGap": 0,
            "yAxis": {"unit": panel.unit, "axisPlacement": "left"},
            "rowsFrame": {"layout": "le"},
            "tooltip": {"mode": "single", "yHistogram": True},
        }
        return {"options": options, "fieldConfig": {"defaults": {}, "overrides": []}}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "textMode": "value_and_name"}
        return {"options": options, "fieldConfig": {"defaults": defaults, "overrides": []}}
    stacked = panel.kind == "stack"
    defaults["custom"] = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 60 if stacked else 5,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return {"options": options, "fieldConfig": {"defaults": defaults, "overrides": []}}


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus", "current": {}}


def _run_variable() -> dict[str, Any]:
    question = "label_values(parashard_build_info, run)"
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": question, "refId": "runs"},
        "definition": question,
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "includeAll": True,
        "allValue": ".*",  # also series without the label
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def queries_of(dashboards: Sequence[Dashboard]) -> list[tuple[str, str]]:
    """Return (where it stands, expression) of every query."""
    return [
        (f"{dashboard.uid}: {panel.title}", query.expr)
        for dashboard in dashboards
        for panel in dashboard.panels
        for query in panel.queries
    ]
