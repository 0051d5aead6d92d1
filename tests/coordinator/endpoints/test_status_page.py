"""The status page shows and does nothing: no form, nothing inline or foreign, and no name that becomes markup."""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.display.status_tables import status_dict
from parashard.telemetry.http import HEADERS
from parashard_coordinator.endpoints.page import STATIC, status_page
from support.status_cases import status_of
from support.status_port import StatusPort, status_port
from support.waiting import DEADLINE_S

PHASES = pb.PhaseSeconds(push=1.0, compute=2.0, transfer=8.0)
EVIL = "<script>alert('x')</script>&\""


def full_status(text: str = "worker-0") -> pb.GetStatusReply:
    return pb.GetStatusReply(
        job=text,
        state=pb.JOB_STATE_RUNNING,
        reason=text,
        consistency=text,
        steps_total=2000,
        steps_complete=1500,
        training_loss=0.25,
        held_out={text: 0.5},
        workers=[
            pb.WorkerStatus(name=text, live=True, device=text, phases=PHASES),
            pb.WorkerStatus(name="gone", device="cpu"),
        ],
        shards=[
            pb.ShardStatus(
                shard=0,
                address=text,
                live=True,
                record=shard_pb2.InspectReply(variable_bytes=3 * 2**20, pull_bytes=3, pull_unmoved_bytes=1),
            ),
            pb.ShardStatus(shard=1),
        ],
        events=[text, "the last event"],
        problems=["no space left"],
    )


class Elements(HTMLParser):
    """Collects what the page is made of."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_it_shows_the_job() -> None:
    text = Elements(status_page(full_status())).text
    for shown in (
        "worker-0: running",
        "1,500 of 2,000",
        "held-out worker-0",
        "0.5000",
        "3.0",
        "take 80 % of a step, 88 % of that while computing",
        "25 %",
        "down",
        "shard-1",
        "no space left",
    ):
        assert shown in text
    assert text.count("down") == 2, "a worker and a shard"
    assert text.index("the last event") < len(text) - 1 - text[::-1].index("worker-0"), "the newest event comes first"


def test_it_has_nothing_that_acts() -> None:
    page = Elements(status_page(full_status()))
    assert not {"style", "form", "button", "input", "textarea", "img", "iframe", "object", "base"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not [name for name in names if name.startswith("on") or name in ("style", "action", "formaction")]
    places = {value for name, value in page.attributes if name in ("src", "href")}
    assert places == {f"static/{name}" for name in STATIC} | {
        "#events-heading",
        "metrics",
        "status.json",
        "history.json",
    }
    assert ("value", "1500") in page.attributes
    assert ("max", "2000") in page.attributes


def test_names_are_escaped_wherever_they_stand() -> None:
    page = Elements(status_page(full_status(EVIL)))
    assert page.tags == Elements(status_page(full_status())).tags
    assert "".join(page.text).count(EVIL) >= 8
    assert status_page(full_status(EVIL)).count(b"<script") == 2, "those of the page"
    assert b"<script>" not in status_page(full_status(EVIL))


@pytest.mark.parametrize("state", [state for state in pb.JobState.values() if state])
def test_an_empty_status_in_any_state_has_a_page(state: int) -> None:
    page = status_page(pb.GetStatusReply(job="digits", state=state))  # type: ignore[arg-type]
    assert f"digits: {pb.JobState.Name(state)[10:].lower()}" in Elements(page).text  # type: ignore[arg-type]


FOLDER = Path(str(files("parashard_coordinator").joinpath("static")))
KEYS = {
    "run_id",
    "coordinator",
    "last",
    "complete",
    "begins",
    "plots",
    "columns",
}


@pytest.fixture
def served() -> Iterator[StatusPort]:
    with status_port() as port:
        yield port


def ask(served: StatusPort, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(served.port.address, timeout=DEADLINE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def told(served: StatusPort, path: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    status, headers, body = ask(served, path)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return json.loads(body, parse_constant=refuse)


@pytest.mark.parametrize(
    "path", ["/", "/status.json", "/history.json?since=1", "/metrics", *(f"/static/{name}" for name in STATIC)]
)
def test_every_path_is_told_to_load_nothing_from_elsewhere(served: StatusPort, path: str) -> None:
    status, headers, body = ask(served, path)
    assert status == 200
    assert headers.items() >= HEADERS.items()
    policy = headers["Content-Security-Policy"].split("; ")
    assert policy[:4] == ["default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    again, same, nothing = ask(served, path, "HEAD")
    assert (again, nothing) == (200, b"")
    if path != "/metrics":  # which counts
        assert same["Content-Length"] == str(len(body))


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static",
        "/static/../page.py",
        "/static/..%2fpage.py",
        "/static//etc/passwd",
        "/static/uplot",
        "/static/uplot/README.md",
        "/static/page.js/",
        "/status.json/",
    ],
)
def test_other_files_are_not_served(served: StatusPort, path: str) -> None:
    assert ask(served, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/status.json", "/history.json", "/static/page.js"])
def test_no_verb_acts(served: StatusPort, method: str, path: str) -> None:
    assert ask(served, path, method)[0] == 501


def test_the_status_is_that_of_the_command_line_and_the_page_s_texts(served: StatusPort) -> None:
    served.status = status_of(training_loss=math.nan, held_out={"loss": math.inf})
    status = told(served, "/status.json")
    screen = status.pop("screen")
    assert status == status_dict(served.status)
    assert status["steps_complete"] == "250"
    assert screen["heading"] == "digits: running"
    assert ["steps", "250 of 1,000"] in screen["figures"]
    assert ["held-out loss", "inf"] in screen["figures"]
    assert [row[0] for row in screen["workers"]["rows"]] == ["worker-0", "worker-1"]
    assert screen["shards"]["live"] == [True, False]


def test_the_history_has_a_column_for_each_line_of_each_plot(served: StatusPort) -> None:
    for elapsed_s in (1.0, 2.0, 3.0):
        metrics = {"loss": 0.5, "mean_squared_error": 2.0}
        served.show(status_of(run_id="run-1", elapsed_s=elapsed_s, held_out=metrics, training_loss=math.nan))
    history = told(served, "/history.json")
    assert history.keys() == KEYS
    assert (history["run_id"], history["coordinator"], history["last"], history["complete"]) == ("run-1", 1, 3, True)
    drawn = {line["column"]: line["name"] for plot in history["plots"] for line in plot["lines"]}
    assert drawn.keys() <= history["columns"].keys()
    assert drawn["held_out.mean_squared_error"] == "held-out mean squared error"
    assert [plot["title"] for plot in history["plots"]][:2] == ["loss", "mean squared error"]
    assert history["columns"]["elapsed_s"] == [1.0, 2.0, 3.0]
    assert history["columns"]["training_loss"] == [None] * 3
    assert history["columns"]["shards_live"] == [1] * 3
    assert {len(column) for column in history["columns"].values()} == {3}


def test_the_history_is_reported_from_a_point_on(served: StatusPort) -> None:
    for elapsed_s in (1.0, 2.0, 3.0):
        served.show(status_of(elapsed_s=elapsed_s))
    assert told(served, "/history.json?since=2")["columns"]["elapsed_s"] == [3.0]
    assert told(served, "/history.json?since=3")["columns"]["elapsed_s"] == []
    served.begin_again()
    served.show(status_of(elapsed_s=4000.0))
    history = told(served, "/history.json?since=0")
    assert (history["coordinator"], history["complete"], history["begins"]) == (2, False, "66 min 40 s")


@pytest.mark.parametrize(
    "query", ["since=", "since=-1", "since=1e3", "since=" + "9" * 19, "x=1", "since=1&since=2", "&"]
)
def test_a_history_since_nonsense_is_refused(served: StatusPort, query: str) -> None:
    status, _, body = ask(served, f"/history.json?{query}")
    assert (status, body[:18]) == (400, b"history.json takes")


def test_all_files_beside_licence_origin_and_frame_are_served_and_small() -> None:
    there = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert there == STATIC.keys() | {"page.html", "uplot/LICENSE", "uplot/README.md"}
    assert sum((FOLDER / name).stat().st_size for name in STATIC) < 100_000


def test_the_library_is_the_published_one() -> None:
    sums = re.findall(r"^([0-9a-f]{64})  package/dist/(\S+)$", (FOLDER / "uplot" / "README.md").read_text(), re.M)
    assert len(sums) == 2
    for digest, name in sums:
        assert hashlib.sha256((FOLDER / "uplot" / name).read_bytes()).hexdigest() == digest
