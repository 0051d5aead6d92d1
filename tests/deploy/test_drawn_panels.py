"""deploy.grafana.draw: what Prometheus answers becomes a picture, with values as people read them."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")

from deploy.grafana.contents import DASHBOARDS, FAILURES, STALENESS
from deploy.grafana.draw import CAPTION, POINTS, Series, Span, picture, shown


class Remembered(Span):
    """A span that is not asked of a Prometheus."""

    answer: Callable[[str, str], list[Series]] = staticmethod(lambda expr, legend: [])

    def ask(self, expr: str, legend: str) -> list[Series]:
        return type(self).answer(expr, legend)


def span(answer: Callable[[str, str], list[Series]]) -> Span:
    of = type("Answering", (Remembered,), {"answer": staticmethod(answer)})
    return of("http://nowhere", 0.0, 300.0, 10.0)


def rising(expr: str, legend: str) -> list[Series]:
    values = np.linspace(0, 3, POINTS + 1)
    return [
        Series(f"{legend} {bound}", {"le": bound}, (n + 1) * values) for n, bound in enumerate(("0.0", "8.0", "+Inf"))
    ]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_every_panel_of_a_dashboard_is_in_its_picture(dashboard) -> None:
    figure = picture(dashboard, span(rising))
    titles = {axes.get_title(loc="left") for axes in figure.axes}
    assert {panel.title for panel in dashboard.panels} <= titles
    assert figure.get_supxlabel() == CAPTION


def test_the_caption_says_that_grafana_was_not_run() -> None:
    assert "Grafana itself was not run" in CAPTION


def test_a_panel_without_data_says_so() -> None:
    figure = picture(DASHBOARDS[0], span(lambda expr, legend: []))
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["no data"] * len(DASHBOARDS[0].panels)


def test_a_heat_map_shows_each_buckets_own_share() -> None:
    def cumulative(expr: str, legend: str) -> list[Series]:
        bounds = {"+Inf": 10.0, "8.0": 9.0, "0.0": 3.0}  # in no order
        return [Series("", {"le": bound}, np.full(POINTS + 1, count)) for bound, count in bounds.items()]

    figure = picture(STALENESS, span(cumulative))
    figure.savefig(io.BytesIO(), dpi=20)
    (mesh,) = figure.axes[0].collections
    assert np.asarray(mesh.get_array()).reshape(3, -1)[:, 0] == pytest.approx([0.3, 0.6, 0.1])
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["0", "8", "+Inf"]


def test_names_under_a_panel_are_no_wider_than_it() -> None:
    alerts = ("ParashardCertificateExpiresSoon", "ParashardShardsRestarting", "ParashardWorkersRestarting")
    figure = picture(FAILURES, span(lambda expr, legend: [Series(name, {}, np.ones(POINTS + 1)) for name in alerts]))
    figure.savefig(io.BytesIO(), dpi=20)
    widths = {round(axes.get_window_extent().width) for axes in figure.axes[: len(FAILURES.panels)]}
    assert min(widths) > 0.26 * figure.bbox.width  # three in a row; legends that stick out take the room of panels


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0025, "s", "2.5 ms"),
        (90.0, "s", "90 s"),
        (0.0, "s", "0"),
        (2.5 * 86400, "s", "2.5 days"),
        (7200.0, "s", "2 h"),
        (0.0, "Bps", "0"),
        (3 * 2**20, "bytes", "3 MiB"),
        (1000 * 2**10, "bytes", "1000 KiB"),
        (1536, "Bps", "1.5 KiB/s"),
        (0.5, "percentunit", "50%"),
        (12_000, "short", "12k"),
        (0.25, "suffix: pushes", "0.25"),
    ],
)
def test_values_read_as_people_write_them(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text
