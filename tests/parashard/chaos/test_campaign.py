"""The campaign, in virtual time: strikes when they are due, ends each, adds up what lasts on one link, and counts."""

import math
import signal
from itertools import chain, count

import pytest

from parashard.chaos.campaign import (
    DELAY_S,
    LENGTHS_S,
    RESTART_S_MAX,
    RETRY_S,
    Campaign,
    ScheduledFault,
    scheduled_faults,
)
from parashard.chaos.proxy import NO_LINK_FAULTS, LinkFaults

SHUT = LinkFaults(requests_held=True, answers_held=True)


class FakeField:
    """Writes down what is done to it."""

    def __init__(self) -> None:
        self.running = {"coordinator", "shard-0", "worker-0"}
        self.is_ready = True
        self.done: list[tuple[str, object]] = []

    def ready(self) -> bool:
        return self.is_ready

    def signal(self, process: str, number: int) -> bool:
        if process in self.running:
            self.done.append((process, signal.Signals(number).name))
        return process in self.running

    def stray(self, process: str) -> bool:
        if process in self.running:
            self.done.append((process, "stray"))
        return process in self.running

    def set_faults(self, link: str, faults: LinkFaults) -> None:
        self.done.append((link, faults))

    def reset(self, link: str) -> None:
        self.done.append((link, "reset"))

    def fill_disk(self) -> None:
        self.done.append(("disk", "full"))

    def free_disk(self) -> None:
        self.done.append(("disk", "free"))


@pytest.fixture
def field() -> FakeField:
    """Return three processes and any link that is named."""
    return FakeField()


def campaign(field: FakeField, *planned: ScheduledFault, faults_max: int | None = None) -> Campaign:
    never = (ScheduledFault(math.inf, "reset", "shard-0", 0.0, False) for _ in count())
    return Campaign(field, chain(planned, never), faults_max)


def fault(at_s: float, kind: str, target: str, length_s: float = 0.0, towards_backend: bool = True) -> ScheduledFault:
    return ScheduledFault(at_s, kind, target, length_s, towards_backend)


# --- when ---


def test_time_counts_from_when_all_processes_run(field):
    field.is_ready = False
    it = campaign(field, fault(1.0, "kill_worker", "worker-0"))
    assert it.advance(100.0) == RETRY_S
    field.is_ready = True
    assert it.advance(200.0) == pytest.approx(1.0)
    assert field.done == []
    it.advance(201.0)
    assert field.done == [("worker-0", "SIGKILL")]


def test_a_hung_process_is_never_continued(field):  # P22
    it = campaign(field, fault(1.0, "hang_shard", "shard-0"))
    it.advance(0.0)
    it.advance(2.0)
    assert it.advance(1e6) == math.inf
    it.lift()
    assert field.done == [("shard-0", "SIGSTOP")]
    assert it.faults == {"hang_shard": 1}


def test_a_stray_is_a_second_process_and_leaves_the_first_alone(field):  # P23
    it = campaign(field, fault(1.0, "stray_shard", "shard-0"), fault(2.0, "stray_coordinator", "coordinator"))
    it.advance(0.0)
    it.advance(5.0)
    assert field.done == [("shard-0", "stray"), ("coordinator", "stray")]
    assert it.faults == {"stray_shard": 1, "stray_coordinator": 1}


def test_it_returns_the_time_until_its_next_call(field):
    it = campaign(field, fault(1.0, "pause_shard", "shard-0", 2.0), fault(8.0, "kill_worker", "worker-0"))
    assert it.advance(0.0) == pytest.approx(1.0)
    assert it.advance(1.0) == pytest.approx(2.0)  # until the pause ends
    assert it.advance(3.0) == pytest.approx(5.0)
    assert it.advance(8.0) == math.inf


def test_a_late_call_does_everything_that_was_due(field):
    it = campaign(field, fault(1.0, "kill_worker", "worker-0"), fault(2.0, "kill_shard", "shard-0"))
    it.advance(0.0)
    it.advance(9.0)
    assert field.done == [("worker-0", "SIGKILL"), ("shard-0", "SIGKILL")]


# --- processes ---


def test_a_pause_ends(field):
    it = campaign(field, fault(1.0, "pause_worker", "worker-0", 2.0))
    for now_s in (0.0, 1.0, 2.9, 3.0, 4.0):
        it.advance(now_s)
    assert field.done == [("worker-0", "SIGSTOP"), ("worker-0", "SIGCONT")]


def test_two_pauses_of_one_process_end_with_the_later_one(field):
    pauses = [fault(1.0, "pause_worker", "worker-0", 4.0), fault(2.0, "pause_worker", "worker-0", 1.0)]
    it = campaign(field, fault(0.5, "partition", "worker-0>coordinator", 20.0), *pauses)
    for now_s in (0.0, 1.0, 2.0, 3.0):
        it.advance(now_s)
    assert field.done[1:] == [("worker-0", "SIGSTOP")] * 2
    it.advance(5.0)
    assert field.done[3:] == [("worker-0", "SIGCONT")]


def test_a_process_that_is_away_is_waited_for(field):
    field.running.remove("worker-0")
    it = campaign(field, fault(1.0, "kill_worker", "worker-0"))
    it.advance(0.0)
    assert it.advance(1.0) == RETRY_S
    assert it.faults.total() == 0
    field.running.add("worker-0")
    it.advance(2.0)
    assert field.done == [("worker-0", "SIGKILL")]
    assert it.faults == {"kill_worker": 1}


def test_strikes_after_one_that_waited_keep_their_distance(field):
    field.running.remove("worker-0")
    it = campaign(field, fault(1.0, "kill_worker", "worker-0"), fault(2.5, "kill_worker", "worker-0"))
    it.advance(0.0)
    it.advance(1.0)
    field.running.add("worker-0")
    assert it.advance(7.0) == pytest.approx(1.5)
    assert it.faults == {"kill_worker": 1}
    it.advance(8.5)
    assert it.faults == {"kill_worker": 2}


def test_a_process_that_stays_away_is_given_up_and_not_counted(field):
    field.running.remove("worker-0")
    it = campaign(field, fault(1.0, "kill_worker", "worker-0"), fault(2.0, "kill_shard", "shard-0"))
    it.advance(0.0)
    it.advance(1.0)
    assert it.advance(1.0 + RESTART_S_MAX) == pytest.approx(1.0)
    assert field.done == []
    it.advance(2.0 + RESTART_S_MAX)
    assert field.done == [("shard-0", "SIGKILL")]
    assert it.faults == {"kill_shard": 1}


# --- links ---


@pytest.mark.parametrize(
    ("kind", "towards_backend", "faults"),
    [
        ("partition", True, SHUT),
        ("one_way", True, LinkFaults(requests_held=True)),
        ("one_way", False, LinkFaults(answers_held=True)),
        ("delay", True, LinkFaults(delay_s=DELAY_S)),
    ],
)
def test_a_fault_of_a_link_begins_and_ends(field, kind, towards_backend, faults):
    it = campaign(field, fault(1.0, kind, "shard-0", 2.0, towards_backend))
    for now_s in (0.0, 1.0, 3.0):
        it.advance(now_s)
    assert field.done == [("shard-0", faults), ("shard-0", NO_LINK_FAULTS)]


def test_duplicates_begin_with_a_reset_since_only_new_connections_have_them(field):
    it = campaign(field, fault(1.0, "duplicate", "shard-0", 2.0))
    for now_s in (0.0, 1.0, 3.0):
        it.advance(now_s)
    assert field.done == [("shard-0", LinkFaults(duplicate=True)), ("shard-0", "reset"), ("shard-0", NO_LINK_FAULTS)]


def test_a_reset_leaves_what_lasts_as_it_is(field):
    it = campaign(field, fault(1.0, "partition", "shard-0", 5.0), fault(2.0, "reset", "shard-0"))
    for now_s in (0.0, 1.0, 2.0):
        it.advance(now_s)
    assert field.done == [("shard-0", SHUT), ("shard-0", SHUT), ("shard-0", "reset")]


def test_faults_of_one_link_add_up_and_those_of_another_do_not(field):
    it = campaign(
        field,
        fault(1.0, "delay", "shard-0", 3.0),
        fault(2.0, "partition", "shard-1", 9.0),
        fault(3.0, "one_way", "shard-0", 5.0),
    )
    for now_s in (0.0, 1.0, 2.0, 3.0, 4.0, 8.0):
        it.advance(now_s)
    assert [faults for link, faults in field.done if link == "shard-0"] == [
        LinkFaults(delay_s=DELAY_S),
        LinkFaults(delay_s=DELAY_S, requests_held=True),
        LinkFaults(requests_held=True),
        NO_LINK_FAULTS,
    ]


# --- the end ---


def test_after_so_many_faults_there_are_no_more_and_the_last_ones_end(field):
    it = campaign(
        field,
        fault(1.0, "kill_shard", "shard-0"),
        fault(2.0, "partition", "shard-0", 9.0),
        fault(3.0, "kill_worker", "worker-0"),
        faults_max=2,
    )
    for now_s in (0.0, 1.0, 2.0):
        it.advance(now_s)
    assert it.advance(3.0) == pytest.approx(8.0)
    assert it.advance(11.0) == math.inf
    assert field.done == [("shard-0", "SIGKILL"), ("shard-0", SHUT), ("shard-0", NO_LINK_FAULTS)]
    assert it.faults == {"kill_shard": 1, "partition": 1}


def test_a_full_disk_is_free_again_when_the_last_such_fault_ends(field):
    it = campaign(
        field,
        fault(1.0, "fill_disk", "disk", 2.0),
        fault(2.0, "fill_disk", "disk", 4.0),
        fault(2.5, "pause_worker", "worker-0", 9.0),
    )
    for now_s in (0.0, 1.0, 2.0, 3.0, 6.0):
        it.advance(now_s)
    assert [what for who, what in field.done if who == "disk"] == ["full", "full", "free"]


def test_all_that_lasts_may_be_lifted_at_once_and_nothing_more_begins(field):
    it = campaign(
        field,
        fault(1.0, "pause_worker", "worker-0", 9.0),
        fault(1.0, "partition", "shard-0", 9.0),
        fault(5.0, "kill_worker", "worker-0"),
    )
    it.advance(0.0)
    it.advance(1.0)
    it.lift()
    assert field.done[2:] == [("worker-0", "SIGCONT"), ("shard-0", NO_LINK_FAULTS)]
    assert it.advance(100.0) == math.inf
    assert len(field.done) == 4


def test_each_strike_is_reported_as_it_happens(field):
    told: list[ScheduledFault] = []
    planned = [fault(1.0, "kill_shard", "shard-0"), fault(2.0, "delay", "shard-0", 1.0)]
    it = Campaign(field, iter([*planned, fault(math.inf, "reset", "shard-0")]), None, told.append)
    for now_s in (0.0, 1.0, 2.0, 3.0):
        it.advance(now_s)
    assert told == planned


def test_a_long_campaign_of_every_kind_that_ends_leaves_nothing_behind(field):
    kinds = tuple(kind for kind in LENGTHS_S if not kind.startswith("hang_"))  # which nothing ends, on purpose
    drawn = scheduled_faults(11, 1.0, kinds, sorted(field.running), ["shard-0", "coordinator"])
    it = Campaign(field, drawn, 500)
    now_s = 0.0
    while (pause_s := it.advance(now_s)) != math.inf:
        now_s += pause_s
    assert it.faults.total() == 500
    assert it.faults.keys() == set(kinds)
    for name in ("shard-0", "coordinator"):
        assert (
            next(what for who, what in reversed(field.done) if who == name and isinstance(what, LinkFaults))
            == NO_LINK_FAULTS
        )
    for name in field.running:
        signals = [what for who, what in field.done if who == name and isinstance(what, str) and what != "reset"]
        assert "SIGCONT" in signals[-1 - [*reversed(signals)].index("SIGSTOP") :], name
    assert [what for who, what in field.done if who == "disk"][-1] == "free"
