"""deploy/grafana: the committed JSON is what the program writes, and names only metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.contents import DASHBOARDS
from deploy.grafana.dashboards import present
from deploy.grafana.layout import dashboard_json, of_run, queries_of

ROOT = Path(__file__).resolve().parents[2]
UNITS = ("s", "bytes", "Bps", "percentunit", "percent", "short", "watt", "celsius", "hertz")
QUERIES = queries_of(DASHBOARDS)
JSON = [dashboard_json(dashboard) for dashboard in DASHBOARDS]


@pytest.mark.parametrize(("where", "expr"), QUERIES, ids=[where for where, _ in QUERIES])
def test_a_panel_names_only_series_that_are_exported_or_recorded(where: str, expr: str) -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    rules = (ROOT / "deploy" / "prometheus" / "rules" / "recording.yml").read_text()
    known = documented | {f"{name}_bucket" for name in documented} | set(re.findall(r"record: (\S+)", rules))
    named = re.findall(r"(?:\w+:)?\b(?:parashard|process)_[\w:]+", expr)
    assert named or "DCGM_FI_DEV_" in expr or "ALERTS" in expr
    assert set(named) <= known


@pytest.mark.parametrize(("where", "expr"), QUERIES, ids=[where for where, _ in QUERIES])
def test_every_series_of_ours_is_of_the_chosen_run(where: str, expr: str) -> None:
    ours = re.findall(r"\b(?:parashard|process|ALERTS)[\w:]*(\{[^}]*\})?", expr)
    assert all('run=~"$run"' in labels for labels in ours)


@pytest.mark.parametrize(
    ("expr", "chosen"),
    [
        ("parashard_x", 'parashard_x{run=~"$run"}'),
        ('rate(parashard_x{a="b"}[1m])', 'rate(parashard_x{a="b", run=~"$run"}[1m])'),
        ("run:parashard_x:rate1m / 2", 'run:parashard_x:rate1m{run=~"$run"} / 2'),
        ("sum by (run) (DCGM_FI_DEV_GPU_UTIL)", "sum by (run) (DCGM_FI_DEV_GPU_UTIL)"),
    ],
)
def test_choosing_a_run(expr: str, chosen: str) -> None:
    assert of_run(expr) == chosen


@pytest.mark.parametrize("dashboard", JSON, ids=lambda dashboard: dashboard["uid"])
def test_panels_lie_side_by_side_under_names_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels}) == len(panels)
    places = {(x, y) for p in panels for x, y in [(p["gridPos"]["x"], p["gridPos"]["y"])]}
    assert len(places) == len(panels)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in panels)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_a_panel_says_what_to_read_from_it_and_its_unit(dashboard: Any) -> None:
    for panel in dashboard.panels:
        assert panel.description.endswith(".")
        assert panel.unit in UNITS or panel.unit.startswith("suffix: ")
        assert all(query.legend for query in panel.queries)


def test_names_of_dashboards_are_unique() -> None:
    assert len({dashboard["uid"] for dashboard in JSON}) == len(JSON)
    assert len({dashboard["title"] for dashboard in JSON}) == len(JSON)


def test_what_is_provisioned_is_read_only() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "parashard.yaml").read_text())["providers"]
    assert (source["type"], source["editable"]) == ("prometheus", False)
    assert provider["allowUiUpdates"] is False
    assert all(json.loads(content)["editable"] is False for content in present().values())
