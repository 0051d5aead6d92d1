"""What a run keeps beside its shards' states: fresh, taken up again, of another job, on another number of shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parashard.checkpoints.catalogue import Catalogue, CheckpointId, job_name
from parashard.checkpoints.encoding import decode, encode
from parashard.checkpoints.manifest import ShardManifest, ShardPart
from parashard.data.preprocessing import ClassTarget, Preprocessing
from parashard.errors import ConfigurationError, DamagedCheckpoint, StoreFailed, Superseded
from parashard.plan.partition import Plan, fixed_shards, place, split
from parashard.store import open_store
from parashard.store.claims import claim_incarnation
from parashard_coordinator.core.saved import Saved
from parashard_coordinator.run.store import RunIdentity, RunStore
from support.checkpoint_cases import DIGEST, PLAN, RUN, STEPS, VARIABLES, write_drained
from support.store_fakes import MemoryStore

IDENTITY = {"job": {"seed": 3, "batch_size": 8}, "optimizer": {"kind": "sgd", "learning_rate": 0.1}}


def identity(digest: str = DIGEST, **changed: Any) -> RunIdentity:
    return RunIdentity(digest, {**IDENTITY, **changed}, 'job = { name = "small" }\n')


def plan_on(shards: int) -> Plan:
    """Return a placement as the job file asks for it: without a version of its own."""
    return place(VARIABLES, split(VARIABLES, fixed_shards(shards)), shards)


# --- the run ---


def open_run(run_store: RunStore, run_id: str, mine: RunIdentity, *, resume: bool) -> str:
    """As a coordinator does, with a claim in between."""
    run_id = run_store.check_run(run_id, mine, resume=resume)
    run_store.begin_run(run_id, mine)
    return run_id


def test_a_fresh_run_is_recorded_before_anything_else(store: MemoryStore) -> None:  # P2
    assert open_run(RunStore(store, 1), RUN, identity(), resume=False) == RUN
    record = Catalogue(store).run()
    assert record is not None
    assert (record.run_id, record.job_digest, record.identity) == (RUN, DIGEST, IDENTITY)
    assert record.job_toml == 'job = { name = "small" }\n'


def test_a_coordinator_that_is_started_again_takes_its_run_up(store: MemoryStore) -> None:
    open_run(RunStore(store, 1), RUN, identity(), resume=False)
    assert open_run(RunStore(store, 2), RUN, identity(), resume=False) == RUN


def test_resume_takes_up_the_run_that_there_is_whatever_id_was_drawn(store: MemoryStore) -> None:  # P2
    open_run(RunStore(store, 1), RUN, identity(), resume=False)
    assert open_run(RunStore(store, 2), "drawn-anew", identity(), resume=True) == RUN


def test_without_resume_another_run_s_store_is_refused(store: MemoryStore) -> None:  # P2
    open_run(RunStore(store, 1), RUN, identity(), resume=False)
    with pytest.raises(ConfigurationError, match=f"has run {RUN} already: --resume takes it up"):
        open_run(RunStore(store, 2), "run-2", identity(), resume=False)


def test_an_empty_store_has_nothing_to_resume(store: MemoryStore) -> None:
    with pytest.raises(ConfigurationError, match="--resume: memory://test has no run to take up"):
        open_run(RunStore(store, 1), RUN, identity(), resume=True)
    assert store.contents == {}


@pytest.mark.parametrize("resume", [False, True])
def test_a_changed_job_is_refused_with_both_values_of_its_keys(store: MemoryStore, resume: bool) -> None:  # P2
    open_run(RunStore(store, 1), RUN, identity(), resume=False)
    changed = identity("f" * 64, optimizer={"kind": "sgd", "learning_rate": 0.2}, job={"seed": 4, "batch_size": 8})
    with pytest.raises(ConfigurationError, match=r"changed job: job\.seed is 3 in the run, 4 now; optimizer\.l"):
        open_run(RunStore(store, 2), RUN, changed, resume=resume)


def test_a_damaged_record_is_reported_and_not_written_over(store: MemoryStore) -> None:
    open_run(RunStore(store, 1), RUN, identity(), resume=False)
    store.contents["run.json"] = store.contents["run.json"][:-9]
    with pytest.raises(DamagedCheckpoint, match=r"run\.json"):
        open_run(RunStore(store, 2), RUN, identity(), resume=True)


def test_preprocessing_is_stored_once(store: MemoryStore) -> None:
    first = Preprocessing(input_shape=(2,), target=ClassTarget(classes=("no", "yes")))
    RunStore(store, 1).keep_preprocessing(None)
    assert store.contents == {}
    RunStore(store, 1).keep_preprocessing(first)
    RunStore(store, 2).keep_preprocessing(first)
    assert Preprocessing.model_validate_json(store.contents["preprocessing.json"]) == first


# --- the plan ---


def test_the_first_plan_begins_at_the_first_values(store: MemoryStore) -> None:
    plan, source = RunStore(store, 4).open_plan(plan_on(2))
    assert (plan.version, plan.shards, source) == (1, plan_on(2).shards, "")
    record = Catalogue(store).newest_plan()
    assert record is not None
    assert (record.to_plan(), record.source, record.coordinator_incarnation) == (plan, None, 4)


def test_the_same_placement_stays_in_force(store: MemoryStore) -> None:
    first = RunStore(store, 1).open_plan(plan_on(2))
    assert RunStore(store, 2).open_plan(plan_on(2)) == first
    assert Catalogue(store).plans() == [1]


def test_a_plan_that_is_taken_up_has_the_encodings_of_the_job(store: MemoryStore) -> None:
    wanted = plan_on(2)
    variables = {name: replace(variable, encoding="int8") for name, variable in wanted.variables.items()}
    first = RunStore(store, 1).open_plan(replace(wanted, variables=variables))
    again, _ = RunStore(store, 2).open_plan(replace(wanted, variables=variables))
    assert (again, "") == first
    assert {variable.encoding for variable in again.variables.values()} == {"int8"}


def test_another_placement_takes_effect_over_the_newest_drained_checkpoint(store: MemoryStore) -> None:  # P8
    write_drained(store)
    write_drained(store, seed=1, number=2)
    plan, source = RunStore(store, 2).open_plan(plan_on(3))
    assert (plan.version, len(plan.shards), source) == (PLAN.version + 1, 3, "j2")
    assert RunStore(store, 3).open_plan(plan_on(3)) == (plan, "j2"), "and that stays so"


def test_a_damaged_drained_checkpoint_is_passed_over_only_if_that_is_asked_for(store: MemoryStore) -> None:
    write_drained(store)
    write_drained(store, seed=1, number=2)
    store.contents[job_name(2)] = store.contents[job_name(2)].replace(b"9", b"8", 1)
    with pytest.raises(ConfigurationError, match=r"j2 is damaged; --from-checkpoint j1 .* with \d+ steps"):
        RunStore(store, 2).open_plan(plan_on(3))
    assert RunStore(store, 2).open_plan(plan_on(3), "j1")[1] == "j1"


def test_another_placement_does_not_throw_away_what_shards_have_saved(store: MemoryStore) -> None:  # P8
    write_drained(store)
    ahead = next(name for name in store.contents if name.endswith("manifest.json"))
    manifest = decode(ShardManifest, store.contents[ahead], ahead)
    further = manifest.replaced(number=99, applied=((0, 10**6),))
    store.create(CheckpointId.of(further).manifest_name, encode(further))
    with pytest.raises(ConfigurationError, match=r"Resume it on \d shards, .* --shards 3 --from-checkpoint j1`"):
        RunStore(store, 2).open_plan(plan_on(3))
    assert RunStore(store, 2).open_plan(plan_on(3), "j1")[1] == "j1"


def test_a_checkpoint_that_is_not_there_cannot_be_started_from(store: MemoryStore) -> None:
    write_drained(store)
    with pytest.raises(ConfigurationError, match="--from-checkpoint j7: this run has no such drained checkpoint"):
        RunStore(store, 2).open_plan(plan_on(3), "j7")


def test_another_placement_without_a_drained_checkpoint_is_refused(store: MemoryStore) -> None:  # P8
    RunStore(store, 1).open_plan(plan_on(2))
    with pytest.raises(ConfigurationError, match=r"cluster\.shards = 3: .* on 2 shards.*checkpoint create --stop`"):
        RunStore(store, 2).open_plan(plan_on(3))
    assert Catalogue(store).plans() == [1]


# --- drained checkpoints ---


def parts(count: int = 2) -> list[ShardPart]:
    folder = "shards/p0001/s{:04d}/i00000001-c00000007"
    return [ShardPart(name=folder.format(s), size_bytes=100 + s, sha256=f"{s}" * 64) for s in range(count)]


def added(run_store: RunStore, *, final: bool = False) -> str:
    return run_store.add_job_manifest(RUN, DIGEST, PLAN, STEPS, parts(), final=final)


def test_a_drained_checkpoint_exists_once_its_manifest_is_stored_and_pins_its_parts(store: MemoryStore) -> None:  # P8
    assert added(RunStore(store, 5), final=True) == "j1"
    manifest = Catalogue(store).job_manifest(1)
    assert (manifest.steps, manifest.final, manifest.plan_version) == (STEPS, True, PLAN.version)
    assert list(manifest.parts) == parts()
    assert Catalogue(store).pinned() == {p.name for p in parts()}


def test_drained_checkpoints_are_numbered(store: MemoryStore) -> None:
    assert [added(RunStore(store, incarnation)) for incarnation in (1, 1, 2)] == ["j1", "j2", "j3"]


def test_an_older_coordinator_that_is_not_dead_yet_loses_nothing_and_overwrites_nothing(store: MemoryStore) -> None:
    older, newer = RunStore(store, 1), RunStore(store, 2)
    listed = Catalogue.job_checkpoints
    raced = iter([[], []])
    newer.catalogue.job_checkpoints = older.catalogue.job_checkpoints = lambda: next(raced)  # type: ignore[method-assign]
    assert (added(older), added(newer)) == ("j1", "j2")
    assert listed(Catalogue(store)) == [1, 2]


def test_a_store_that_fails_makes_no_drained_checkpoint(store: MemoryStore) -> None:
    fault = store.fail("create", "jobs/")
    with pytest.raises(StoreFailed, match="no space left"):
        added(RunStore(store, 1))
    assert (fault.fired, Catalogue(store).job_checkpoints()) == (1, [])
    assert added(RunStore(store, 1)) == "j1"


# --- what the coordinator itself saves ---

SAVED = Saved(
    target=40, early_stop="enough", evaluations={0: {"loss": None, "accuracy": 0.5}}, skips=(3, 7), rollbacks=2
)


def loaded(records: RunStore) -> Saved | None:
    """Return what an earlier coordinator has stored, without the time."""
    saved = records.load_saved()
    return None if saved is None else saved.replaced(stored_at=0.0)


def test_what_one_coordinator_saved_the_next_one_loads(store: MemoryStore) -> None:  # P7
    assert RunStore(store, 1).load_saved() is None
    RunStore(store, 1).save(replace_target(30))
    RunStore(store, 1).save(SAVED)
    assert loaded(RunStore(store, 2)) == SAVED


def replace_target(target: int) -> Saved:
    return SAVED.replaced(target=target)


def test_the_latest_incarnation_s_counts_whenever_it_was_written(store: MemoryStore) -> None:  # P3
    RunStore(store, 2).save(SAVED)
    RunStore(store, 1).save(replace_target(30))  # an older one, not dead yet
    assert loaded(RunStore(store, 3)) == SAVED


def test_a_damaged_one_is_replaced_by_the_one_before(store: MemoryStore) -> None:
    RunStore(store, 1).save(SAVED)
    RunStore(store, 2).save(replace_target(30))
    store.contents["coordinator/i00000002.json"] = b"{}"
    assert loaded(RunStore(store, 3)) == SAVED


def test_what_a_later_coordinator_would_not_see_is_not_saved(store: MemoryStore) -> None:  # P3
    assert [claim_incarnation(store, "coordinator") for _ in range(2)] == [1, 2]
    with pytest.raises(Superseded, match="a later coordinator has this run; incarnation 1 must stop"):
        RunStore(store, 1).save(replace_target(7))
    RunStore(store, 2).save(replace_target(7))


def test_on_a_disk(tmp_path: Path) -> None:
    first = RunStore(open_store(str(tmp_path)), 1)
    open_run(first, RUN, identity(), resume=False)
    plan, _ = first.open_plan(plan_on(2))
    first.save(SAVED)
    second = RunStore(open_store(str(tmp_path)), 2)
    assert open_run(second, RUN, identity(), resume=True) == RUN
    assert second.open_plan(plan_on(2)) == (plan, "")
    assert loaded(second) == SAVED.replaced(plan_version=plan.version)
