"""docs/runbooks: a page for each alert, true to its rule, that sends nobody after what does not exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from deploy.grafana.contents import DASHBOARDS
from parashard.cli.main import app
from parashard_server.metrics import STALENESS_BUCKETS
from support.prometheus_server import ALERTS, ROOT

RUNBOOKS = ROOT / "docs" / "runbooks"
PAGES = sorted(RUNBOOKS.glob("*.md"))
NUMBERS = {"a": 1, "two": 2, "three": 3, "four": 4, "five": 5, "eight": 8}
PACKAGES = ("parashard", "coordinator", "ps_server", "worker")

each_alert = pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def meaning(rule: dict[str, str]) -> str:
    """Return what a rule's page says that the alert means, in one line."""
    text = (RUNBOOKS / f"{rule['alert']}.md").read_text()
    return " ".join(re.findall(r"\*\*Meaning\.\*\* (.+?)\n\n", text, re.S)[0].split())


def spans(page: Path) -> list[str]:
    """Return a page's code spans."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", page.read_text())]


def minutes(text: str) -> set[int]:
    """Return how many minutes a text speaks of, wherever it does."""
    return {NUMBERS.get(number) or int(number) for number in re.findall(r"\b(\w+) minutes?\b", text)}


@each_alert
def test_an_alert_has_a_page_of_three_parts(rule: dict[str, dict[str, str]]) -> None:
    page = ROOT / rule["annotations"]["runbook_url"]
    assert page.parent == RUNBOOKS
    text = page.read_text()
    assert text.startswith(f"# {rule['alert']}\n")
    for part in ("**Meaning.**", "**Impact.**", "**What to do.**"):
        assert part in text


def test_every_page_is_of_an_alert() -> None:
    assert {page.stem for page in PAGES} - {"README"} == {rule["alert"] for rule in ALERTS}


def test_the_table_says_of_every_alert_what_its_page_says() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \| (.+) \|$", (RUNBOOKS / "README.md").read_text(), re.M)
    wanted = [(rule["alert"], rule["alert"], rule["labels"]["severity"]) for rule in ALERTS]
    assert [row[:3] for row in rows] == wanted
    for rule, (*_, says) in zip(ALERTS, rows, strict=True):
        assert meaning(rule).startswith(says.removesuffix("."))


@each_alert
def test_a_page_names_the_minutes_of_its_rule(rule: dict[str, str]) -> None:
    of_rule = re.findall(r"\[(\d+)m\]", rule["expr"]) + re.findall(r"\d+", rule.get("for", ""))
    assert minutes(meaning(rule)) == {int(number) for number in of_rule}


@each_alert
def test_a_page_names_the_thresholds_of_its_rule(rule: dict[str, str]) -> None:
    says = re.sub(r"\w+", lambda word: str(NUMBERS.get(word[0], word[0])), meaning(rule))
    of_job_state = r"job_state\) [<=]+ \d"
    for number in re.findall(r"[<>] (?:on \(run\) )?([\d.]+)", re.sub(of_job_state, "", rule["expr"])):
        shown = f"{100 * float(number):g} %" if 0 < float(number) < 1 else number
        assert number == "0" or re.search(rf"\b{shown}", says), (number, says)


def test_the_page_of_staleness_says_from_how_many_workers_on_the_histogram_is_too_short() -> None:
    text = (RUNBOOKS / "ParashardStalenessHigh.md").read_text()
    ends, workers = re.findall(r"ends at (\d+) pushes: with (\d+) workers", text)[0]
    assert (int(ends), int(workers)) == (STALENESS_BUCKETS[-1], STALENESS_BUCKETS[-1] // 8)


@each_page
def test_a_command_exists_and_has_these_flags(page: Path) -> None:
    for span in spans(page):
        _, found, arguments = f" {span}".partition(" parashard ")
        words = shlex.split(arguments)
        assert not found or {word for word in words if word.startswith("--")} <= flags_of(words), span


def flags_of(words: list[str]) -> set[str]:
    """Return the flags of the command that these words begin with."""
    command = typer.main.get_command(app)
    for word in words:
        if not (commands := getattr(command, "commands", {})):
            break
        assert word in commands, f"parashard has no command {word!r}"
        command = commands[word]
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
