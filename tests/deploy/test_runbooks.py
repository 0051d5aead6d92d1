"""docs/runbooks: a page for each alert, whose commands and metrics exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from deploy.grafana.contents import DASHBOARDS
from parashard.cli.main import app
from support.prometheus_server import ALERTS, ROOT

RUNBOOKS = ROOT / "docs" / "runbooks"
PAGES = sorted(RUNBOOKS.glob("*.md"))
PACKAGES = ("parashard", "coordinator", "ps_server", "worker")

each_alert = pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def spans(page: Path) -> list[str]:
    """Return a page's code spans."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", page.read_text())]


@each_alert
def test_an_alert_has_a_page(rule: dict[str, dict[str, str]]) -> None:
    assert ROOT / rule["annotations"]["runbook_url"] == RUNBOOKS / f"{rule['alert']}.md"


def test_every_page_is_of_an_alert() -> None:
    assert {page.stem for page in PAGES} - {"README"} == {rule["alert"] for rule in ALERTS}


@each_page
def test_a_command_exists_and_has_these_flags(page: Path) -> None:
    for span in spans(page):
        _, found, arguments = f" {span}".partition(" parashard ")
        words = shlex.split(arguments)
        assert not found or {word for word in words if word.startswith("--")} <= flags_of(words), span


def flags_of(words: list[str]) -> set[str]:
    """Return the flags of the command that these words begin with."""
    command: Any = typer.main.get_command(app)
    for word in words:
        if not (commands := getattr(command, "commands", {})):
            break
        assert word in commands, f"parashard has no command {word!r}"
        command = command.get_command(None, word)
    return {flag for parameter in command.params for flag in parameter.opts}


@each_page
def test_a_metric_a_key_an_alert_and_an_event_of_a_log_exist(page: Path) -> None:
    metrics = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    keys = (ROOT / "docs" / "job-file.md").read_text()
    code = "".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    for span in spans(page):
        assert set(re.findall(r"\bparashard_\w+", span)) <= metrics
        for key in re.findall(r"^(?:job|cluster|checkpoint|consistency|optimizer)\.(\w+)", span):
            assert f"`{key}`" in keys, span
        assert not re.fullmatch(r"Parashard\w+", span) or (RUNBOOKS / f"{span}.md").exists(), span
        assert not re.fullmatch(r"[a-z]+(-[a-z]+)+", span) or f'"{span}"' in code, span


@each_page
def test_a_panel_is_on_that_dashboard(page: Path) -> None:
    titles = {
        f"{board.title.removeprefix('parashard / ')} / {panel.title}" for board in DASHBOARDS for panel in board.panels
    }
    assert set(re.findall(r"\*(\w[\w ]* /\s[\w ]+)\*", " ".join(page.read_text().split()))) <= titles
    assert not re.search(r"\b[Pp]anels? [A-Z]", page.read_text()), "panels are named *Dashboard / Panel*"


@each_page
def test_a_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        assert (page.parent / path).exists(), target
        headings = re.findall(r"^#+ (.+)$", (page.parent / path).read_text(), re.M)
        assert not heading or heading in [title.lower().replace(" ", "-") for title in headings], target
