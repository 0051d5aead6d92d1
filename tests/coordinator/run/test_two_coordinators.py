"""Two coordinators of one run that live at once: late decisions of the older one have no effect (P23)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.manifest import ShardPart
from parashard.errors import Superseded
from parashard.plan.partition import Plan, fixed_shards, place, split
from parashard.process.run_files import HISTORY_FILE, REPORT_FILE, WEIGHTS_FILE
from parashard.store.claims import claim_incarnation
from parashard_coordinator.core.saved import Saved
from parashard_coordinator.run.store import RunStore
from support.checkpoint_cases import DIGEST, PLAN, RUN, STEPS, VARIABLES, write_drained
from support.store_fakes import MemoryStore

UNDECIDED = Saved(target=STEPS, workers_wanted=2)
STOPPED = Saved(target=4, early_stop="target accuracy 0.9 reached: 0.9300", workers_wanted=2)


class RacedStore(MemoryStore):
    """Lets a successor claim, and do more, in the middle of a write: just before the content is there."""

    def __init__(self) -> None:
        super().__init__()
        self.raced: list[tuple[str, Callable[[], object]]] = []

    def race(self, within: str, *then: Callable[[], object]) -> None:
        for call in (lambda: claim_incarnation(self, "coordinator"), *then):
            self.raced.append((within, call))

    def create(self, name: str, content: bytes | memoryview) -> None:
        self._interrupt(name)
        super().create(name, content)

    def replace(self, name: str, content: bytes | memoryview) -> None:
        self._interrupt(name)
        super().replace(name, content)

    def _interrupt(self, name: str) -> None:
        due, self.raced = [call for within, call in self.raced if within in name], []
        for call in due:
            call()


@pytest.fixture
def raced_store() -> RacedStore:
    return RacedStore()


def claimed(store: MemoryStore) -> RunStore:
    return RunStore(store, claim_incarnation(store, "coordinator"))


def taken_over(store: MemoryStore, wanted: Plan | None = None) -> tuple[RunStore, Saved | None]:
    """Return a coordinator that has taken the run over, and what it found."""
    run_store = claimed(store)
    run_store.open_plan(wanted or plan_on(2))
    saved = run_store.load_saved()
    run_store.save(saved or UNDECIDED)
    return run_store, saved


def plan_on(shards: int) -> Plan:
    return place(VARIABLES, split(VARIABLES, fixed_shards(shards)), shards)


def added(run_store: RunStore, *, final: bool = True) -> str:
    folder = "shards/p0001/s{:04d}/i00000001-c00000007"
    parts = [ShardPart(name=folder.format(s), size_bytes=100 + s, sha256=f"{s}" * 64) for s in range(2)]
    return run_store.add_job_manifest(RUN, DIGEST, PLAN, STEPS, parts, final=final)


# --- a successor claims in the middle of a decision ---


def test_a_decision_that_a_successor_has_not_seen_does_not_act(raced_store: RacedStore) -> None:
    older, _ = taken_over(raced_store)
    found: list[Saved | None] = []
    raced_store.race("coordinator/", lambda: found.append(taken_over(raced_store)[1]))
    with pytest.raises(Superseded):
        older.save(STOPPED)
    assert [saved and saved.early_stop for saved in found] == [""]


def test_a_job_does_not_end_with_a_checkpoint_that_a_successor_has_not_seen(raced_store: RacedStore) -> None:
    older, _ = taken_over(raced_store)
    raced_store.race("jobs/", lambda: RunStore(raced_store, 2).save(UNDECIDED))
    with pytest.raises(Superseded):
        added(older)
    assert Catalogue(raced_store).job_manifest(1).final, "it exists, and has no effect"
    _, saved = taken_over(raced_store)
    assert saved is not None
    assert saved.final == ""


def test_a_plan_that_a_successor_has_not_seen_is_passed_over(raced_store: RacedStore) -> None:
    write_drained(raced_store)
    older = claimed(raced_store)
    raced_store.race("plans/", lambda: RunStore(raced_store, 2).open_plan(plan_on(2)), lambda: taken_over(raced_store))
    with pytest.raises(Superseded):
        older.open_plan(plan_on(3))
    assert Catalogue(raced_store).plans() == [PLAN.version, PLAN.version + 1]
    plan, source = claimed(raced_store).open_plan(plan_on(2))
    assert (plan.version, source) == (PLAN.version, "")
    later, source = claimed(raced_store).open_plan(plan_on(3))
    assert (later.version, source) == (PLAN.version + 2, "j1"), "no version has two meanings"


def test_without_a_successor_nothing_is_passed_over(raced_store: RacedStore) -> None:
    older, _ = taken_over(raced_store)
    older.save(STOPPED.replaced(target=STEPS))
    assert added(older) == "j1"
    _, saved = taken_over(raced_store)
    assert saved is not None
    assert (saved.early_stop, saved.target, saved.final) == (STOPPED.early_stop, STEPS, "j1")


def test_a_last_checkpoint_of_other_steps_than_the_record_says_does_not_end_the_job(raced_store: RacedStore) -> None:
    """P7: the record is stored first; a report of one's steps with the other's weights would lie."""
    older, _ = taken_over(raced_store)
    older.save(UNDECIDED.replaced(target=STEPS + 1))
    assert added(older) == "j1"
    _, saved = taken_over(raced_store)
    assert saved is not None
    assert (saved.target, saved.final) == (STEPS + 1, "")


# --- an older coordinator is only slow ---


def test_what_it_saves_after_a_successor_took_over_is_not_read(raced_store: RacedStore) -> None:
    older, _ = taken_over(raced_store)
    taken_over(raced_store)
    with pytest.raises(Superseded):
        older.save(STOPPED)
    _, saved = taken_over(raced_store)
    assert saved is not None
    assert saved.early_stop == ""


def test_the_results_that_it_copies_after_a_successor_took_over_end_it(raced_store: RacedStore, tmp_path: Path) -> None:
    """Before it tells that the job is done: the successor's copies are still to come."""
    older, _ = taken_over(raced_store)
    for name in (WEIGHTS_FILE, REPORT_FILE, HISTORY_FILE):
        (tmp_path / name).write_bytes(b"older")
    older.keep_results(tmp_path)
    taken_over(raced_store)
    with pytest.raises(Superseded):
        older.keep_results(tmp_path)


def test_the_newest_drained_checkpoint_is_the_newest_coordinator_s(raced_store: RacedStore) -> None:
    older, newer = RunStore(raced_store, 1), RunStore(raced_store, 2)
    assert (added(newer), added(older)) == ("j1", "j2"), "there is no later claim"
    newest = Catalogue(raced_store).newest_job_manifest()
    assert newest is not None
    assert (newest.number, newest.coordinator_incarnation) == (1, 2)


def test_it_makes_no_drained_checkpoint_of_parts_that_may_be_gone(raced_store: RacedStore) -> None:
    older, _ = taken_over(raced_store)
    taken_over(raced_store)
    with pytest.raises(Superseded):
        added(older)
    assert Catalogue(raced_store).job_checkpoints() == []


# --- what a return to a drained checkpoint gives up ---


def test_a_stop_that_was_decided_beyond_the_checkpoint_is_given_up_with_it(raced_store: RacedStore) -> None:
    write_drained(raced_store)
    beyond = {"early_stop": STOPPED.early_stop, "target": STEPS + 3, "skips": (1, STEPS), "final": "j2"}
    evaluations = {STEPS: {"accuracy": 0.5}, STEPS + 3: {"accuracy": 0.93}}
    older, _ = taken_over(raced_store)
    older.save(UNDECIDED.replaced(**beyond, evaluations=evaluations))
    returned = claimed(raced_store)
    assert returned.open_plan(plan_on(2), "j1")[1] == "j1"
    saved = returned.load_saved()
    assert saved is not None
    assert (saved.early_stop, saved.skips, saved.final) == ("", (1,), "")
    assert saved.evaluations == {STEPS: {"accuracy": 0.5}}
    again = claimed(raced_store)  # which was not asked to return: the one before it died before it took over
    again.open_plan(plan_on(2))
    assert again.load_saved() == saved


def test_a_stop_that_the_checkpoint_has_come_to_stays_decided(raced_store: RacedStore) -> None:
    write_drained(raced_store)
    older, _ = taken_over(raced_store)
    older.save(STOPPED.replaced(target=STEPS))
    later = claimed(raced_store)
    later.open_plan(plan_on(3))
    saved = later.load_saved()
    assert saved is not None
    assert (saved.early_stop, saved.target) == (STOPPED.early_stop, STEPS)
