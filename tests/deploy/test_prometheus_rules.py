"""deploy/prometheus: configurations and rules as promtool judges them."""

from __future__ import annotations

import re

import pytest

from support.prometheus_server import ALERTS, PROMETHEUS, ROOT, RULES, minutes_become_seconds, needs_promtool, promtool

CONFIGURATIONS = ("prometheus.yml", "local.yml", "static.yml")


@needs_promtool
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_prometheus_takes_the_configuration(name: str) -> None:
    promtool("check", "config", PROMETHEUS / name)


@needs_promtool
@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_prometheus_takes_the_rules(path: object) -> None:
    promtool("check", "rules", path)


@needs_promtool
def test_each_alert_fires_when_it_should_and_not_before() -> None:
    promtool("test", "rules", ROOT / "tests" / "deploy" / "alerts.promtool.yml")


@pytest.mark.parametrize("alert", [rule["alert"] for rule in ALERTS])
def test_each_alert_has_a_case(alert: str) -> None:
    assert alert in (ROOT / "tests" / "deploy" / "alerts.promtool.yml").read_text()


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_every_duration_is_in_minutes_so_that_minutes_can_become_seconds(path: object) -> None:
    text = path.read_text()  # type: ignore[attr-defined]
    durations = re.findall(r"\[(\w+)\]|\bfor: (\w+)", text)
    assert durations
    assert all(re.fullmatch(r"\d+m", first or second) for first, second in durations)
    assert not re.search(r"\[\d+m\]|for: \d+m", minutes_become_seconds(text))
    assert len(re.findall(r"\[\d+s\]|for: \d+s", minutes_become_seconds(text))) == len(durations)
