"""Which checkpoint of a shard is published: a later one that has every step of the one before, whole, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.manifest import TableRule
from parashard.checkpoints.retention import collect
from parashard.checkpoints.row_files import TableChange, TableWriter
from parashard.errors import StoreFailed
from parashard.plan.embedding import candidates_of
from parashard.plan.partition import fixed_shards, place, split
from support.checkpoint_cases import VARIABLES, model_of, write_job, write_plan
from support.serving_cases import Committer, ShardLife, keys_of_shard, served_rows, stored_rows, watcher_of
from support.store_fakes import MemoryStore

A, B, C = (int(key) for key in keys_of_shard(0, 3))
D, E = (int(key) for key in keys_of_shard(1, 2))


class Job:
    """Two shards in a store, and a watcher."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.committer = Committer(store)
        self.committer.write_plan()
        self.lives = [ShardLife(0), ShardLife(1)]
        self.watcher = watcher_of(store)

    def begin(self) -> None:
        """Commit a first checkpoint of each shard, and publish it."""
        self.committer.commit(self.lives[0], [0], {A: (1.0, 1.0)})
        self.committer.commit(self.lives[1], [0], {D: (1.0, 1.0)})
        assert self.watcher.look()

    def ids(self) -> list[str]:
        assert self.watcher.published is not None
        return [str(version.id) for version in self.watcher.published.versions]


@pytest.fixture
def job(store: MemoryStore) -> Job:
    return Job(store)


def test_nothing_is_published_until_every_shard_has_saved(job: Job) -> None:
    assert not job.watcher.look()
    job.committer.commit(job.lives[0], [0], {A: (1.0, 1.0)})
    assert not job.watcher.look()
    assert job.watcher.published is None
    assert job.watcher.sight.problem == "plan 1: not every shard has saved yet"
    job.committer.commit(job.lives[1], [0], {})
    assert job.watcher.look()
    assert (job.ids(), job.watcher.sight.problem) == (["p1/s0/i1/c1", "p1/s1/i1/c1"], "")


def test_no_plan_is_said(store: MemoryStore) -> None:
    watcher = watcher_of(store)
    assert not watcher.look()
    assert watcher.sight.problem == "no plan is stored yet"


def test_each_shard_moves_by_itself_to_its_newest(job: Job) -> None:
    job.begin()
    job.committer.commit(job.lives[0], [1], {B: (2.0, 2.0)})
    job.committer.commit(job.lives[0], [2], {A: (3.0, 3.0)}, gone=[B])
    assert job.watcher.look()
    assert job.ids() == ["p1/s0/i1/c3", "p1/s1/i1/c1"]
    assert served_rows(job.watcher) == {A: (3.0, 3.0), D: (1.0, 1.0)}
    assert not job.watcher.look()


def test_variables_are_those_of_the_version(job: Job) -> None:
    job.begin()
    job.committer.commit(job.lives[0], [1], {})
    job.watcher.look()
    for shard, seed in zip(job.watcher.published.shards, (2, 1), strict=True):
        for partition, values in shard.variables.items():
            due = model_of(seed)[partition.variable][partition.row_start : partition.row_stop]
            assert values.tobytes() == due.tobytes()


def test_an_increment_reads_only_its_own_files(job: Job) -> None:
    job.begin()
    job.committer.commit(job.lives[0], [1], {B: (2.0, 2.0)})
    job.store.calls.clear()
    job.watcher.look()
    read = [name for call, name in job.store.calls if call == "read" and "tables-" in name]
    assert read == ["shards/p0001/s0000/i00000001-c00000002/tables-0.safetensors"]


def test_a_shard_that_wrote_all_rows_anew_has_the_same_rows(job: Job) -> None:
    job.begin()
    job.committer.commit(job.lives[0], [1], {B: (2.0, 2.0), C: (4.0, 4.0)})
    job.watcher.look()
    change = job.watcher.published.shards[0].tables["user"].change
    job.committer.commit(job.lives[0], [2], {B: (5.0, 5.0)}, gone=[C], anew=True)
    assert job.watcher.look()
    assert served_rows(job.watcher) == {A: (1.0, 1.0), B: (5.0, 5.0), D: (1.0, 1.0)}
    keys, _, gone = job.watcher.published.shards[0].tables["user"].rows.since(change)
    assert (keys.tolist(), gone.tolist()) == ([B], [C])  # the others' subscribers need not hear of them


def test_what_lacks_published_steps_is_held_back_until_it_has_them(job: Job) -> None:
    """A process that was taken for dead saved once more: the shard's next life lacks what that had."""
    job.begin()
    restored = job.lives[0].copy()
    job.committer.commit(job.lives[0], [1, 2], {B: (2.0, 2.0)})
    job.watcher.look()
    restored.incarnation, restored.number = 2, 2
    job.committer.commit(restored, [1], {B: (9.0, 9.0)})
    assert not job.watcher.look()
    assert job.ids()[0] == "p1/s0/i1/c2"
    assert job.watcher.sight.problem.startswith("p1/s0/i2/c3 lacks 1 steps of what is published")
    assert job.watcher.sight.newest[0] == CheckpointId(1, 0, 2, 3)
    job.committer.commit(restored, [2], {A: (7.0, 7.0)})
    assert job.watcher.look()
    assert job.ids()[0] == "p1/s0/i2/c4"
    assert served_rows(job.watcher) == {A: (7.0, 7.0), B: (9.0, 9.0), D: (1.0, 1.0)}


def test_a_late_checkpoint_of_an_earlier_incarnation_is_not_taken(job: Job) -> None:
    job.begin()
    restored = job.lives[0].copy()
    restored.incarnation = 2
    job.committer.commit(restored, [1], {A: (2.0, 2.0)})
    job.watcher.look()
    job.committer.commit(job.lives[0], [1, 2, 3], {A: (8.0, 8.0)})
    assert not job.watcher.look()
    assert job.ids()[0] == "p1/s0/i2/c2"


@pytest.mark.parametrize("what", ["tables-0.safetensors", "variables-0.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_and_told(job: Job, what: str) -> None:
    job.begin()
    job.committer.commit(job.lives[0], [1], {B: (2.0, 2.0)})
    name = f"shards/p0001/s0000/i00000001-c00000002/{what}"
    job.store.contents[name] = job.store.contents[name][:-1] + b"x"
    assert not job.watcher.look()
    assert what in job.watcher.sight.problem
    assert served_rows(job.watcher) == {A: (1.0, 1.0), D: (1.0, 1.0)}


def test_a_checkpoint_that_is_deleted_while_it_is_read_gives_way_to_a_newer_one(job: Job) -> None:
    job.begin()
    old = job.committer.commit(job.lives[0], [1], {B: (2.0, 2.0)})

    class Collects(MemoryStore):
        """Deletes the checkpoint at the first look at one of its files, when there is a newer one."""

        def size(self, name: str) -> int:
            if "c00000002/variables" in name and name in self.contents:
                job.committer.commit(job.lives[0], [2], {C: (3.0, 3.0)}, anew=True)
                collect(Catalogue(job.store), CheckpointId.of(old))
            return super().size(name)

    job.watcher.store = Collects(contents=job.store.contents)
    assert job.watcher.look()
    assert job.ids()[0] == "p1/s0/i1/c3"
    assert served_rows(job.watcher) == {A: (1.0, 1.0), B: (2.0, 2.0), C: (3.0, 3.0), D: (1.0, 1.0)}


def test_rows_that_end_by_the_time_alone_are_gone(job: Job) -> None:
    rule = TableRule(table="user", unused_steps=3, norm_below=0.0, norm_every=1000)
    changed = {"table_rules": (rule,)}
    job.committer.commit(job.lives[0], [0], {A: (1.0, 1.0), B: (2.0, 2.0)}, last_use={A: 1, B: 0}, **changed)
    job.committer.commit(job.lives[1], [0], {}, **changed)
    job.watcher.look()
    assert served_rows(job.watcher) == {A: (1.0, 1.0), B: (2.0, 2.0)}
    job.committer.commit(job.lives[0], [1, 2], {}, **changed)  # version 3: the last use of B was three steps ago
    assert job.watcher.look()
    assert served_rows(job.watcher) == {A: (1.0, 1.0)}
    fresh = watcher_of(job.store)
    fresh.look()
    assert served_rows(fresh) == {A: (1.0, 1.0)}


def test_a_subscriber_of_before_hears_that_a_row_ended_though_no_file_was_written(job: Job) -> None:
    changed = {"table_rules": (TableRule(table="user", unused_steps=3, norm_below=0.0, norm_every=1000),)}
    job.committer.commit(job.lives[0], [0], {A: (1.0, 1.0), B: (2.0, 2.0)}, last_use={A: 1, B: 0}, **changed)
    job.committer.commit(job.lives[1], [0], {}, **changed)
    job.watcher.look()
    token = job.watcher.published.shards[0].tables["user"].token
    job.committer.commit(job.lives[0], [1, 2], {}, **changed)
    job.watcher.look()
    again = watcher_of(job.store)
    again.look()
    for watcher in (job.watcher, again):
        table = watcher.published.shards[0].tables["user"]
        assert table.rows.since(table.marks[token])[2].tolist() == [B]


def test_a_key_that_lost_its_row_and_got_one_again_has_it(job: Job) -> None:
    job.begin()
    manifest = job.committer.commit(job.lives[0], [1], {A: (5.0, 5.0)})
    writer = TableWriter(job.store, CheckpointId(1, 0, 7, 7))
    rows = stored_rows({})
    writer.write(TableChange("user", rows, np.array([A], np.uint64)))
    content = job.store.contents.pop("shards/p0001/s0000/i00000007-c00000007/tables-0.safetensors")
    job.store.contents["shards/p0001/s0000/i00000001-c00000002/tables-1.safetensors"] = content
    lost = writer.files[0].replaced(name="tables-1.safetensors", incarnation=1, number=2)
    job.lives[0].files = (*manifest.table_files, lost)
    job.committer.commit(job.lives[0], [2], {})
    job.watcher.look()
    assert job.ids()[0] == "p1/s0/i1/c3"
    assert served_rows(job.watcher) == {A: (5.0, 5.0), D: (1.0, 1.0)}


def test_keys_that_are_only_counted_are_no_rows(job: Job) -> None:
    job.begin()
    manifest = job.committer.commit(job.lives[0], [1], {})
    counted = tuple(file.replaced(table=candidates_of("user")) for file in manifest.table_files)
    assert counted
    life = job.lives[0]
    life.files = (*life.files, *counted)
    job.committer.commit(life, [2], {})
    job.watcher.look()
    assert job.ids()[0] == "p1/s0/i1/c3"
    assert served_rows(job.watcher) == {A: (1.0, 1.0), D: (1.0, 1.0)}


def test_a_manifest_that_counts_other_rows_than_its_files_have_is_damaged(job: Job) -> None:
    job.begin()
    job.committer.commit(job.lives[0], [1], {B: (2.0, 2.0)}, tables=(("user", 3),))
    assert not job.watcher.look()
    assert "the files make 2 rows of table 'user', the manifest says 3" in job.watcher.sight.problem


class TestAnotherPlan:
    """The job went on with another number of shards."""

    def plan(self, job: Job) -> Committer:
        plan = place(VARIABLES, split(VARIABLES, fixed_shards(1)), 1, version=2)
        write_plan(job.store, plan)
        return Committer(job.store, plan)

    def test_it_is_served_as_a_whole_once_all_of_it_has_saved(self, job: Job) -> None:
        job.begin()
        committer = self.plan(job)
        assert not job.watcher.look()
        life = ShardLife(0)
        committer.commit(life, [0, 1], {A: (1.0, 1.0), D: (6.0, 6.0)})
        assert job.watcher.look()
        assert job.ids() == ["p2/s0/i1/c1"]
        assert served_rows(job.watcher) == {A: (1.0, 1.0), D: (6.0, 6.0)}

    def test_it_is_held_back_while_it_lacks_a_step_of_any_shard(self, job: Job) -> None:
        job.begin()
        job.committer.commit(job.lives[1], [1], {})
        job.watcher.look()
        committer, life = self.plan(job), ShardLife(0)
        committer.commit(life, [0], {})
        assert not job.watcher.look()
        assert "p2/s0/i1/c1 lacks 1 steps" in job.watcher.sight.problem
        committer.commit(life, [1], {})
        assert job.watcher.look()

    def test_a_later_checkpoint_of_the_earlier_plan_is_not_taken(self, job: Job) -> None:
        job.begin()
        committer = self.plan(job)
        committer.commit(ShardLife(0), [0], {})
        job.watcher.look()
        job.committer.commit(job.lives[0], [1, 2], {A: (3.0, 3.0)})
        assert not job.watcher.look()
        assert job.ids() == ["p2/s0/i1/c1"]


def test_in_rounds_a_round_that_was_given_up_is_not_published(job: Job) -> None:
    job.committer.commit(job.lives[0], [0], {A: (1.0, 1.0)}, round=1)
    restored = job.lives[0].copy()
    job.committer.commit(job.lives[0], [1], {A: (2.0, 2.0)}, round=2)
    job.committer.commit(job.lives[1], [0], {}, round=1)
    job.store.create("claims/shard-0/00000002", b"host 1 token\nreturned to round 1\n")
    job.watcher.look()
    assert job.ids() == ["p1/s0/i1/c1", "p1/s1/i1/c1"]
    restored.incarnation, restored.number = 2, 2
    job.committer.commit(restored, [1], {A: (3.0, 3.0)}, round=2)
    assert job.watcher.look()
    assert served_rows(job.watcher) == {A: (3.0, 3.0)}


def test_the_end_of_the_job_is_seen(job: Job) -> None:
    job.begin()
    assert job.watcher.sight.final_steps is None
    manifests = [Catalogue(job.store).manifest(CheckpointId(1, shard, 1, 1)) for shard in range(2)]
    write_job(job.store, 1, manifests, steps=1, final=True)
    job.watcher.look()
    assert job.watcher.sight.final_steps == 1


def test_a_store_that_does_not_answer_leaves_what_is_published(job: Job) -> None:
    job.begin()
    fault = job.store.fail("folders", "s0001", error=StoreFailed("no answer"))
    job.committer.commit(job.lives[0], [1], {B: (2.0, 2.0)})
    with pytest.raises(StoreFailed, match="no answer"):
        job.watcher.look()
    assert fault.fired == 1
    assert job.ids()[0] == "p1/s0/i1/c1"
    assert job.watcher.look()
