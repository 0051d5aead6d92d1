"""deploy/prometheus: configurations and rules as promtool judges them, and a runbook for each alert."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from prometheus_server import PROMETHEUS, ROOT, RULES, minutes_become_seconds, needs_promtool

CONFIGURATIONS = ("prometheus.yml", "local.yml", "static.yml")
ALERTS = [
    rule
    for path in RULES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]
RUNBOOKS = ROOT / "docs" / "runbooks"


def promtool(*arguments: object) -> None:
    ran = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


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


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_what_it_is_and_what_to_do(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    page = ROOT / rule["annotations"]["runbook_url"]
    assert page.parent == RUNBOOKS
    text = page.read_text()
    assert text.startswith(f"# {rule['alert']}\n")
    for part in ("**Meaning.**", "**Impact.**", "**What to do.**"):
        assert part in text


def test_every_runbook_is_of_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"} == {rule["alert"] for rule in ALERTS}


def test_runbooks_name_keys_and_alerts_that_there_are() -> None:
    keys = (ROOT / "docs" / "job-file.md").read_text()
    for path in RUNBOOKS.glob("*.md"):
        text = path.read_text()
        for key in re.findall(r"`(?:job|cluster|checkpoint|consistency|optimizer)\.(\w+)", text):
            assert f"`{key}`" in keys, (path.name, key)
        for alert in re.findall(r"`(Parashard\w+)`", text):
            assert (RUNBOOKS / f"{alert}.md").exists(), (path.name, alert)


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_every_duration_is_in_minutes_so_that_minutes_can_become_seconds(path: object) -> None:
    text = path.read_text()  # type: ignore[attr-defined]
    durations = re.findall(r"\[(\w+)\]|\bfor: (\w+)", text)
    assert durations
    assert all(re.fullmatch(r"\d+m", first or second) for first, second in durations)
    assert not re.search(r"\[\d+m\]|for: \d+m", minutes_become_seconds(text))
    assert len(re.findall(r"\[\d+s\]|for: \d+s", minutes_become_seconds(text))) == len(durations)
