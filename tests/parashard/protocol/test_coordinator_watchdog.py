"""A process gives up once its coordinator has been away for long enough, and not for any other silence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pytest

from parashard.process.shell import Stop
from parashard.process.starts import WorkerStart
from parashard.protocol.coordinator_client import WATCHDOG_LOOK_S, CoordinatorClient, client_of, give_up

AFTER_S = 3 * WATCHDOG_LOOK_S


class Told(Stop):
    """Sets at each look whether the client's last call was unanswered; stops at the end of the list."""

    def __init__(self, client: CoordinatorClient, unanswered: Iterable[bool]) -> None:
        super().__init__()
        self._client = client
        self._unanswered = iter(unanswered)
        self.looks = 0

    def wait(self, timeout_s: float) -> bool:
        assert timeout_s == WATCHDOG_LOOK_S
        if self.asked:
            return True
        self.looks += 1
        told = next(self._unanswered, None)
        self._client.unanswered = bool(told)
        return told is None


@pytest.fixture
def client() -> Iterator[CoordinatorClient]:
    client = CoordinatorClient("127.0.0.1:1")
    yield client
    client.close()


@pytest.mark.parametrize(
    ("unanswered", "looks"),
    [
        ([True] * 9, 3),
        ([False] * 5 + [True] * 9, 8),
        ([True, True, False, True, True, False, True, True, True], 9),
    ],
    ids=["from the start", "later", "again and again"],
)
def test_it_stops_once_there_was_no_answer_for_so_long(
    client: CoordinatorClient, unanswered: list[bool], looks: int
) -> None:
    stop = Told(client, unanswered)
    give_up(client, stop, AFTER_S)
    assert (stop.looks, stop.reason) == (looks, "the coordinator has been away for 3 s")


@pytest.mark.parametrize("unanswered", [[False] * 100, [True, True, False] * 100], ids=["answered", "hardly answered"])
def test_a_coordinator_that_comes_back_is_waited_for(client: CoordinatorClient, unanswered: list[bool]) -> None:
    stop = Told(client, unanswered)
    give_up(client, stop, AFTER_S)
    assert not stop.asked
    assert stop.looks == len(unanswered) + 1


@pytest.mark.parametrize(("told", "seconds"), [([], math.inf), (["--give-up-s", "600"], 600.0)])
def test_a_client_gives_up_only_if_told_to(told: list[str], seconds: float) -> None:
    start = WorkerStart.read(["--connect", "127.0.0.1:1", *told])
    stop = Stop()
    client = client_of(start, stop, None)
    usual = CoordinatorClient("127.0.0.1:1")
    assert start.give_up_s == seconds
    assert client.retry_budget_s == (math.inf if told else usual.retry_budget_s), "it ends before it gives up otherwise"
    stop.ask("the test ends")
    for one in (client, usual):
        one.close()
