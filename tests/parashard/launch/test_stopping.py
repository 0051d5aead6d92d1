"""What an interrupted run says: how far it came, what of that is saved, and how to continue."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from parashard.checkpoints.catalogue import Catalogue, CheckpointId, plan_name
from parashard.checkpoints.encoding import encode
from parashard.checkpoints.manifest import PlanRecord, TableFile
from parashard.errors import StoreFailed
from parashard.launch.run_folders import read_report, write_report
from parashard.launch.stopping import report_of_saved, restorable_in_all, saved_by_shard, steps_in_all, stopped_line
from parashard.plan.intervals import IntervalSet
from parashard.store.local import LocalStore
from support.checkpoint_cases import PLAN, write_drained, write_plan, write_shard
from support.store_fakes import MemoryStore


def saved(store: MemoryStore) -> int:
    return steps_in_all(saved_by_shard(Catalogue(store)))


def of_shards(store: MemoryStore) -> list[int]:
    return [len(steps) for steps in saved_by_shard(Catalogue(store))]


def write(store: MemoryStore, shard: int, number: int, *applied: tuple[int, int], round_: int | None = None) -> None:
    write_shard(store, CheckpointId(1, shard, 1, number), applied=applied, round=round_)


def test_nothing_is_saved_before_every_shard_has_a_checkpoint() -> None:
    store = MemoryStore()
    assert saved(store) == 0
    write_plan(store)
    assert saved(store) == 0
    write(store, 0, 1, (0, 5))
    assert saved(store) == 0
    write(store, 1, 1, (0, 4))
    assert saved(store) == 4


def test_steps_are_saved_that_the_newest_checkpoint_of_every_shard_has() -> None:
    store = MemoryStore()
    write_plan(store)
    write(store, 0, 1, (0, 2))
    write(store, 0, 2, (0, 6), (8, 9))
    write(store, 1, 1, (0, 1))
    write(store, 1, 2, (0, 4), (5, 9))
    assert saved(store) == 6, "steps 0..3, 5 and 8"
    assert of_shards(store) == [7, 8]


def test_in_rounds_all_shards_go_back_to_the_newest_round_that_each_has() -> None:
    store = MemoryStore()
    write_plan(store)
    for number, round_ in ((1, 1), (2, 2), (3, 3)):
        write(store, 0, number, (0, 4 * round_), round_=round_)
    for number, round_ in ((1, 1), (2, 2)):
        write(store, 1, number, (0, 4 * round_), round_=round_)
    assert saved(store) == 8
    assert of_shards(store) == [8, 8]


def test_a_damaged_manifest_does_not_count() -> None:
    store = MemoryStore()
    write_plan(store)
    for shard in range(2):
        write(store, shard, 1, (0, 3))
        write(store, shard, 2, (0, 7))
    store.contents[CheckpointId(1, 1, 1, 2).manifest_name] = b"no manifest"
    assert saved(store) == 3


def test_shards_of_a_new_plan_begin_with_the_drained_checkpoint_that_it_was_made_of() -> None:
    store = MemoryStore()
    steps = write_drained(store).steps
    plan = PLAN.__class__(2, PLAN.variables, PLAN.shards)
    store.create(plan_name(2), encode(PlanRecord.of(plan, source="j1", coordinator_incarnation=2)))
    assert saved(store) == steps


@pytest.mark.parametrize(
    ("complete", "line"),
    [
        (2500, "stopped at step 2,503 of 13,500 (saved)"),  # a step came in after the last look
        (2503, "stopped at step 2,503 of 13,500 (saved)"),
        (2504, "stopped at step 2,504 of 13,500 (saved up to step 2,503; 1 step will be recomputed)"),
        (13000, "stopped at step 13,000 of 13,500 (saved up to step 2,503; 10,497 steps will be recomputed)"),
    ],
)
def test_the_line_says_what_is_saved_and_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: int, line: str
) -> None:
    store = LocalStore(tmp_path / "run 1" / "checkpoints")
    write_plan(store)
    for shard in range(2):
        write_shard(store, CheckpointId(1, shard, 1, 1), applied=((0, 2503),))
    monkeypatch.chdir(tmp_path)
    told = stopped_line(tmp_path / "run 1", saved_by_shard(Catalogue(store)), complete, 13500)
    assert told == f"{line}. Continue: parashard resume 'run 1'"


def test_a_store_that_fails_does_not_hide_how_to_continue(tmp_path: Path) -> None:
    told = stopped_line(tmp_path, StoreFailed("no way to the store"), 7, 10)
    note = "(what is saved is not known: no way to the store)"
    assert told == f"stopped at step 7 of 10 {note}. Continue: parashard resume {tmp_path}"


def test_the_report_of_a_stopped_run_has_the_steps_that_the_shards_saved_last(tmp_path: Path) -> None:
    write_report(tmp_path, {"job": "small", "state": "stopped", "steps_total": 1500, "steps_applied": [1182, 1202]})
    heard = read_report(tmp_path)
    told = report_of_saved(tmp_path, heard, [IntervalSet([(0, 1234)]), IntervalSet([(0, 1230), (1231, 1235)])])
    assert told == heard | {"steps_applied": [1234, 1234]} == read_report(tmp_path)


def test_a_report_stays_as_it_is_where_nothing_is_known_to_be_saved(tmp_path: Path) -> None:
    heard = {"state": "stopped", "steps_applied": [3, 4]}
    assert report_of_saved(tmp_path, heard, StoreFailed("no way to the store")) == heard
    assert report_of_saved(tmp_path, heard, []) == heard
    assert report_of_saved(tmp_path, {}, [IntervalSet([(0, 3)])]) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_keeps_the_correction_off_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("parashard.launch.run_folders.write_durably", full)
    heard = {"state": "stopped", "steps_applied": [3]}
    assert report_of_saved(tmp_path, heard, [IntervalSet([(0, 5)])])["steps_applied"] == [5]


def test_what_every_kept_checkpoint_has_no_shard_can_need_again() -> None:
    store = MemoryStore()
    assert list(restorable_in_all(Catalogue(store), 1).intervals()) == []
    write_plan(store)
    write(store, 0, 1, (0, 5))
    write(store, 0, 2, (0, 9))
    write(store, 1, 1, (0, 4), (6, 7))
    assert list(restorable_in_all(Catalogue(store), 2).intervals()) == [], "the second shard may begin anew"
    write(store, 1, 2, (0, 8))
    assert list(restorable_in_all(Catalogue(store), 2).intervals()) == [(0, 4)]
    assert list(restorable_in_all(Catalogue(store), 3).intervals()) == []


def write_rows(store: MemoryStore, number: int, stop: int, since: int) -> None:
    """Write a checkpoint of the first shard whose oldest file with rows is of the checkpoint `since`."""
    file = TableFile(
        name="tables-000.safetensors",
        size_bytes=1,
        sha256="0" * 64,
        incarnation=1,
        number=since,
        table="t",
        rows=1,
        gone=0,
        buckets=(0, 1),
    )
    write_shard(store, CheckpointId(1, 0, 1, number), applied=((0, stop),), table_files=(file,))


def test_with_one_chain_of_files_of_rows_a_shard_may_begin_anew_where_one_is_damaged() -> None:
    store = MemoryStore()
    write_plan(store)
    for number in (1, 2, 3):
        write(store, 1, number, (0, 9))
        write_rows(store, number, 2 * number, since=1)
    catalogue = Catalogue(store)
    assert list(restorable_in_all(catalogue, 3).intervals()) == []
    assert list(restorable_in_all(catalogue, 3, after_damage=False).intervals()) == [(0, 2)]
    write_rows(store, 4, 8, since=4)
    assert list(restorable_in_all(catalogue, 3).intervals()) == [(0, 2)]


@pytest.mark.parametrize(("keep", "steps"), [(1, [(0, 5)]), (2, [])])
def test_one_checkpoint_without_rows_is_enough_only_where_no_more_are_kept(keep: int, steps: list[object]) -> None:
    store = MemoryStore()
    write_plan(store)
    for shard in range(2):
        write(store, shard, 1, (0, 5))
    assert list(restorable_in_all(Catalogue(store), keep).intervals()) == steps
