"""PodLedger: every end once, taken away told from failed, whatever repeats and whatever was missed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard_coordinator.core.supervision import REASONS, Pod, PodEnd, PodLedger

RUNNING = Pod("uid-0", "digits-worker-0-abcde", "worker", "Running")


@pytest.fixture
def ledger() -> PodLedger:
    ledger = PodLedger()
    ledger.listed([RUNNING])
    return ledger


def reasons(ends: list[PodEnd]) -> list[str]:
    return [end.reason for end in ends]


@pytest.mark.parametrize(
    ("phase", "exit_code", "disruption", "reason"),
    [
        ("Succeeded", 0, "", "done"),
        ("Failed", 1, "", "failed"),
        ("Failed", 137, "", "failed"),
        ("Failed", 75, "", "stopped"),
        ("Failed", 143, "", "stopped"),
        ("Failed", 75, "PreemptionByScheduler", "preempted"),
        ("Failed", 137, "TerminationByKubelet", "preempted"),
        ("Succeeded", 0, "EvictionByEvictionAPI", "preempted"),
        ("Failed", None, "DeletionByTaintManager", "preempted"),
        ("Failed", None, "", "unseen"),
    ],
)
def test_why_a_pod_ended(ledger, phase, exit_code, disruption, reason):
    ends = ledger.changed(RUNNING._replace(phase=phase, exit_code=exit_code, disruption=disruption))
    assert reasons(ends) == [reason]


def test_an_end_is_reported_once(ledger):
    failed = RUNNING._replace(phase="Failed", exit_code=1)
    assert reasons(ledger.changed(failed)) == ["failed"]
    assert ledger.changed(failed) == []
    assert ledger.listed([failed]) == []
    assert ledger.deleted(failed) == []


def test_a_container_that_starts_again_in_place_has_ended_too(ledger):
    assert reasons(ledger.changed(RUNNING._replace(restarts=1, last_exit_code=137))) == ["failed"]
    assert ledger.changed(RUNNING._replace(restarts=1, last_exit_code=137)) == []
    assert reasons(ledger.changed(RUNNING._replace(restarts=2, last_exit_code=0))) == ["stopped"]


def test_a_pod_missing_from_the_list_ended_unobserved(ledger):
    assert reasons(ledger.listed([])) == ["unseen"]


def test_one_that_was_being_taken_away_before_was_preempted(ledger):
    assert ledger.changed(RUNNING._replace(disruption="PreemptionByScheduler")) == []
    assert reasons(ledger.listed([])) == ["preempted"]


def test_a_new_pod_of_the_same_name_is_another(ledger):
    again = RUNNING._replace(uid="uid-1")
    assert reasons(ledger.listed([again])) == ["unseen"]
    assert reasons(ledger.changed(again._replace(phase="Failed", exit_code=1))) == ["failed"]


def test_what_ended_before_the_first_look_is_no_news():
    ledger = PodLedger()
    assert ledger.listed([RUNNING._replace(phase="Failed", exit_code=1, restarts=3)]) == []
    assert ledger.changed(RUNNING._replace(phase="Failed", exit_code=1, restarts=3)) == []


def test_an_end_reads_as_a_sentence(ledger):
    (end,) = ledger.changed(RUNNING._replace(phase="Failed", exit_code=75, disruption="PreemptionByScheduler"))
    assert str(end) == "pod digits-worker-0-abcde preempted (PreemptionByScheduler), exit code 75"


ends_of_a_pod = st.sampled_from(
    [
        RUNNING._replace(phase="Succeeded", exit_code=0),
        RUNNING._replace(phase="Failed", exit_code=1),
        RUNNING._replace(phase="Failed", exit_code=75, disruption="PreemptionByScheduler"),
    ]
)


@given(end=ends_of_a_pod, how=st.lists(st.sampled_from(["event", "list"]), max_size=6), deleted=st.booleans())
def test_however_often_and_in_whatever_way_an_end_is_heard_it_counts_once(end, how, deleted):
    ledger = PodLedger()
    ledger.listed([RUNNING])
    told = [one for way in how for one in (ledger.changed(end) if way == "event" else ledger.listed([end]))]
    told += ledger.deleted(end) if deleted else ledger.listed([])
    assert len(told) == 1
    assert told[0].reason in REASONS
