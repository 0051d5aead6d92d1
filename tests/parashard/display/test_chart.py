"""The picture of a run: what is drawn of a history, and that it is an SVG."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from parashard.display.chart import POINTS_MAX, Panel, panels_of, svg

FIRST, SECOND = {"loss": 0.6, "top_5": 0.8}, {"loss": 0.4, "top_5": 0.9}


def line(step: int, loss: Any, held_out: Any) -> dict[str, Any]:
    return {"steps_complete": step, "training_loss": loss, "held_out": held_out}


def test_panels_have_the_loss_and_each_held_out_metric_by_step() -> None:
    history = [line(0, None, {}), line(10, 0.7, {}), line(20, 0.5, FIRST), line(30, 0.4, FIRST), line(40, 0.3, SECOND)]
    assert panels_of(history) == [
        Panel("loss", {"training": [(10, 0.7), (20, 0.5), (30, 0.4), (40, 0.3)], "held out": [(20, 0.6), (40, 0.4)]}),
        Panel("top 5", {"held out": [(20, 0.8), (40, 0.9)]}),
    ]


def test_what_is_not_finite_is_left_out_and_nothing_to_draw_is_no_panel() -> None:
    odd = [line(1, float("nan"), {"loss": None}), {"steps_complete": "x"}, {}, line(2, float("inf"), {})]
    assert panels_of(odd) == []


def test_a_long_history_is_thinned_to_its_last_point() -> None:
    (panel,) = panels_of([line(step, 1.0 / (step + 1), {}) for step in range(5 * POINTS_MAX + 3)])
    drawn = panel.lines["training"]
    assert POINTS_MAX / 2 < len(drawn) <= POINTS_MAX + 1
    assert (drawn[0][0], drawn[-1][0]) == (0, 5 * POINTS_MAX + 2)


@pytest.mark.parametrize("values", [[0.5], [0.0, 0.0], [-3.0, 2e9], [1e-12, 1e-13]])
def test_the_picture_is_an_svg_with_every_point_within_it(values: list[float]) -> None:
    panel = Panel("a < b", {"training": [(step, value) for step, value in enumerate(values)]})
    root = ElementTree.fromstring(svg("run & co", [panel, panel]))
    assert root.attrib["aria-label"] == "run & co"
    lines = root.findall(".//{*}polyline")
    assert len(lines) == 2
    for point in lines[0].attrib["points"].split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= float(root.attrib["width"])
        assert 0 <= y <= 220
    assert [text.text for text in root.findall(".//{*}text")].count("a < b") == 2
