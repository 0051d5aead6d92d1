"""Names of workers and shards: a newer incarnation fences an older one."""

from __future__ import annotations

import pytest

from parashard.errors import NotReady, Superseded, UnknownWorker, WrongRun
from parashard_coordinator.core.membership import Shards, WorkerRecord, Workers
from support.coordinator_cases import registration

TTL_S = 10.0


def workers_of(same_arithmetic: bool = False) -> Workers:
    return Workers(TTL_S, same_arithmetic=same_arithmetic)


def join(workers: Workers, name: str = "", fingerprint: str = "x86", now_s: float = 0.0) -> WorkerRecord:
    return workers.register(name, fingerprint, "cpu", "host:9", now_s)


def test_each_incarnation_under_a_name_has_a_higher_number() -> None:  # P3
    workers = workers_of()
    assert [join(workers, "worker-0").incarnation for _ in range(3)] == [1, 2, 3]
    assert workers.by_name["worker-0"].restarts == 2
    assert len(workers.live) == 1


def test_a_new_incarnation_keeps_what_was_done_under_its_name() -> None:
    workers = workers_of()
    join(workers, "worker-0").steps_complete = 7
    assert join(workers, "worker-0").steps_complete == 7


def test_who_brings_no_name_gets_the_lowest_free_one_after_the_launcher_s() -> None:
    workers = workers_of()
    assert [join(workers).name for _ in range(3)] == ["guest-0", "guest-1", "guest-2"]
    workers.mark_left(workers.by_name["guest-1"])
    assert (join(workers).name, workers.by_name["guest-1"].incarnation) == ("guest-1", 2)


def test_an_earlier_incarnation_is_told_to_stop() -> None:  # P3
    workers = workers_of()
    join(workers, "worker-0")
    join(workers, "worker-0")
    with pytest.raises(Superseded, match="worker-0 is incarnation 2 now; incarnation 1 must stop"):
        workers.record_call("worker-0", 1, 1, 0.0)
    assert workers.record_call("worker-0", 2, 1, 0.0).incarnation == 2


def test_an_unknown_worker_is_told_to_join_again() -> None:
    with pytest.raises(UnknownWorker, match="stray is not known to this coordinator; it has to join again"):
        workers_of().record_call("stray", 1, 1, 0.0)


@pytest.mark.parametrize("late", [5, 4, 0])
def test_a_late_or_repeated_call_is_refused(late: int) -> None:
    workers = workers_of()
    join(workers, "worker-0")
    workers.record_call("worker-0", 1, 5, 1.0)
    with pytest.raises(NotReady, match=f"call {late} comes after call 5"):
        workers.record_call("worker-0", 1, late, 9.0)
    assert workers.by_name["worker-0"].last_seen_s == 1.0


def test_calls_are_numbered_from_one() -> None:
    workers = workers_of()
    join(workers, "worker-0")
    with pytest.raises(NotReady, match="call 0 comes after call 0"):
        workers.record_call("worker-0", 1, 0, 0.0)
    assert workers.record_call("worker-0", 1, 1, 0.0).live


def test_who_is_silent_for_longer_than_the_lease_time_is_found() -> None:
    workers = workers_of()
    join(workers, "worker-0", now_s=0.0)
    join(workers, "worker-1", now_s=5.0)
    assert workers.silent(TTL_S) == []
    assert [worker.name for worker in workers.silent(TTL_S + 0.001)] == ["worker-0"]
    workers.record_call("worker-0", 1, 1, TTL_S + 0.001)
    assert [worker.name for worker in workers.silent(5.001 + TTL_S)] == ["worker-1"]


def test_a_call_brings_a_worker_that_was_given_up_back() -> None:
    workers = workers_of()
    workers.mark_left(join(workers, "worker-0"))
    assert workers.silent(900.0) == [], "known already"
    assert workers.record_call("worker-0", 1, 1, 900.0).live


def test_a_held_call_is_answered_only_while_it_is_its_worker_s_latest() -> None:
    workers = workers_of()
    worker = join(workers, "worker-0")
    workers.record_call("worker-0", 1, 4, 0.0)
    assert workers.is_latest_call("worker-0", 1, 4)
    assert not workers.is_latest_call("worker-0", 1, 3)
    assert not workers.is_latest_call("worker-0", 2, 4)
    assert not workers.is_latest_call("worker-1", 1, 4)
    workers.mark_left(worker)
    assert not workers.is_latest_call("worker-0", 1, 4)


def test_other_arithmetic_is_refused_where_bits_must_agree() -> None:  # P13
    workers = workers_of(same_arithmetic=True)
    join(workers, "worker-0", "x86")
    with pytest.raises(WrongRun, match=r"allow_mixed = true drops that promise\): arm is not x86"):
        join(workers, "worker-1", "arm")
    assert list(workers.by_name) == ["worker-0"]
    join(workers, "worker-1", "x86")


def test_the_first_arithmetic_binds_even_after_its_worker_has_gone() -> None:  # P13
    workers = workers_of(same_arithmetic=True)
    workers.mark_left(join(workers, "worker-0", "x86"))
    with pytest.raises(WrongRun):
        join(workers, "worker-0", "arm")


def test_other_arithmetic_is_welcome_elsewhere() -> None:
    workers = workers_of(same_arithmetic=False)
    join(workers, "worker-0", "x86")
    join(workers, "worker-1", "arm")
    assert workers.fingerprint == "x86"


def test_shards_are_missed_by_name_until_all_have_registered() -> None:  # P3
    shards = Shards(3)
    shards.register(1, registration(1))
    assert not shards.all_registered
    with pytest.raises(NotReady, match="waiting for shard 0, 2 to register"):
        shards.registrations()
    shards.register(0, registration(0))
    shards.register(2, registration(2))
    assert shards.all_registered
    assert shards.registrations() == [registration(0), registration(1), registration(2)]


def test_every_registration_raises_the_view() -> None:
    shards = Shards(2)
    shards.register(0, registration(0))
    shards.register(0, registration(0, 2))
    assert shards.view == 2
    assert shards.registration(0) == registration(0, 2)
    assert shards.registration(1) is None


def test_an_older_incarnation_of_a_shard_does_not_replace_a_newer_one() -> None:  # P3
    shards = Shards(1)
    shards.register(0, registration(0, 3))
    with pytest.raises(Superseded, match="shard 0: incarnation 3 is registered, 2 is older"):
        shards.register(0, registration(0, 2))
    assert shards.registrations() == [registration(0, 3)]
    assert shards.view == 1
    shards.register(0, registration(0, 3))  # the same incarnation may repeat itself: its first reply was lost


@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_that_the_plan_does_not_have_is_refused(shard: int) -> None:
    with pytest.raises(WrongRun, match=rf"shards 0\.\.1, found shard {shard}"):
        Shards(2).register(shard, registration(0))


def test_acks_of_other_incarnations_do_not_count() -> None:  # P3
    shards = Shards(3)
    shards.register(0, registration(0, 1))
    shards.register(1, registration(1, 4))
    assert shards.acknowledged([1, 4, 1]) == [0, 1], "shard 2 has not registered"
    assert shards.acknowledged([1, 3, 1]) == [0]
    assert shards.acknowledged([2, 5, 0]) == []
    assert shards.acknowledged([]) == []
