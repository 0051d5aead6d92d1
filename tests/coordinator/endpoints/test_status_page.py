"""The status page shows and does nothing: no form, nothing inline or foreign, and no name that becomes markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard_coordinator.endpoints.page import status_page
from parashard_coordinator.endpoints.pages import STATIC

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
