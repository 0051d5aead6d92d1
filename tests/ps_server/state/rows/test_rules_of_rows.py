"""Rows that come and go by rules: the bits of the readable reference, whatever is swept, saved or restored (P29)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.manifest import ShardManifest
from parashard.checkpoints.row_files import TableChange, TableWriter, iterate_rows
from parashard.errors import JobFailed
from parashard.plan.embedding import EmbeddingTable, mixed, unmixed
from parashard.plan.optimizers import Adagrad, Adam
from parashard.plan.row_rules import RowRules
from parashard.plan.variables import Initializer
from parashard_server.state.rows import records, row_saving
from parashard_server.state.rows.embedding_tables import EmbeddingTables
from parashard_server.state.rows.records import Records
from parashard_server.state.rows.row_index import ABSENT
from parashard_server.state.rows.row_memory import RowValues
from parashard_server.state.rows.table_rows import TableRows
from support.reference_rows import ReferenceRows
from support.row_pieces import next_piece
from support.store_fakes import MemoryStore
from support.tiers import fewer

TABLE = EmbeddingTable("user", 3, Adam(0.1), Initializer("normal", 0.1), rows_max=400, keys_per_step_max=100)
TEN = np.sort(mixed(np.arange(100, 110)))
EVERY = np.sort(mixed(np.arange(40)))
RULES = {
    "age": RowRules(evict_unused_steps=3),
    "norm": RowRules(evict_norm_below=0.25, evict_norm_every=2),
    "count": RowRules(admit_after=3),
    "count and age": RowRules(admit_after=2, evict_unused_steps=4),
    "chance": RowRules(admit_probability=0.4),
    "lru": RowRules(evict_above_rows=12),
    "lfu": RowRules(evict_above_rows=12, evict_first="lfu"),
    "all": RowRules(2, 0.7, 5, 0.2, 3, 14, "lfu"),
}


def pushed(each: TableRows | ReferenceRows, ids: set[int], clock: int) -> None:
    keys = np.sort(mixed(np.array(sorted(ids))))
    gradients = np.random.default_rng(clock).normal(size=(len(keys), 3)).astype(np.float32)
    each.push(keys, gradients, clock=clock)


def same(rows: TableRows, reference: ReferenceRows, now: int) -> None:
    present, expected = reference.pull(EVERY, now)
    found = rows.pull(EVERY, now)
    assert found.present.tolist() == present
    assert found.values.tobytes() == b"".join(row.tobytes() for row in expected)
    references, _, _ = rows.records.find(EVERY[found.present], now)
    due = [reference.rows[key] for key in EVERY[found.present].tolist()]
    assert rows.records.memory.t_of(references).tolist() == [row.t for row in due]
    assert rows.records.memory.last_use_of(references).tolist() == [row.last_use for row in due]


ids = st.sets(st.integers(0, 39), min_size=1, max_size=14)


@pytest.mark.parametrize("rule", RULES)
@given(st.lists(ids, min_size=1, max_size=14), st.integers(1, 5))
@fewer(4)
def test_rows_that_come_and_go_have_the_bits_of_the_reference(rule: str, pushes: list[set[int]], swept: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(records, "SWEPT_LEAST", swept)
        table = replace(TABLE, rules=RULES[rule])
        rows, reference = TableRows(table, 5), ReferenceRows(table, 5)
        for clock, some in enumerate(pushes, 1):
            pushed(rows, some, clock)
            pushed(reference, some, clock)
            same(rows, reference, clock)
        same(rows, reference, len(pushes) + 3)


class Shard:
    """Tables whose checkpoints are in a store, as a shard writes them, but without a lock."""

    def __init__(self, table: EmbeddingTable, store: MemoryStore, incarnation: int) -> None:
        self.tables = EmbeddingTables([table], 5, 0, 1)
        self.store, self.incarnation, self.number = store, incarnation, 0
        self.manifest: ShardManifest | None = None

    @property
    def rows(self) -> TableRows:
        return self.tables.by_name["user"]

    def save(self, clock: int, meanwhile: list[set[int]], reference: ReferenceRows, *, succeeds: bool) -> int:
        """Save beside pushes; return the time after them."""
        cut = self.tables.cut(clock)
        self.number += 1
        id_ = CheckpointId(0, 0, self.incarnation, self.number)
        writer, later = TableWriter(self.store, id_), iter(meanwhile)

        def go_on() -> None:
            nonlocal clock
            some = next(later, None)
            if some is not None:
                clock += 1
                pushed(self.rows, some, clock)
                pushed(reference, some, clock)

        for name, saving in cut.savings.items():
            go_on()
            saving.prepare()
            if len(gone := saving.gone()):
                writer.write(TableChange(name, saving.without_rows(), gone))
            while (piece := next_piece(saving)) is not None:
                writer.write(TableChange(name, saving.stored(piece), np.empty(0, np.uint64)))
                go_on()
        files = (*cut.kept, *writer.files)
        self.tables.end_save(cut, files if succeeds else None)
        if succeeds:
            self.manifest = ShardManifest(
                run_id="r", job_digest="0" * 64, plan_version=0, shard=0, incarnation=self.incarnation,
                number=self.number, round=None, version=cut.clock, applied=(), slots=(), partitions=(), files=(),
                written_at=0.0, tables=tuple(sorted(cut.counts.items())), table_files=files,
                table_rules=cut.rules,
            )  # fmt: skip
        return clock

    def restored(self, table: EmbeddingTable) -> Shard:
        """Return another life, from the newest checkpoint."""
        assert self.manifest is not None
        again = Shard(table, self.store, self.incarnation + 1)
        stored = tuple(iterate_rows(self.store, self.manifest, ended_too=True))
        again.tables.restore(stored, clock=self.manifest.version, files=self.manifest.table_files)
        again.manifest = self.manifest
        return again


rounds = st.lists(
    st.tuples(st.lists(ids, max_size=4), st.lists(ids, max_size=4), st.booleans(), st.booleans()),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("rule", RULES)
@given(rounds)
@fewer(4)
def test_a_life_from_a_checkpoint_decides_like_the_one_that_wrote_it(rule: str, lives: list) -> None:
    """What is saved, beside pushes or not, is the rows at the cut; and the same pushes from there end the same."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_saving, "PIECE_BYTES", 150)
        patched.setattr(records, "SWEPT_LEAST", 1)
        table, store = replace(TABLE, rules=RULES[rule]), MemoryStore()
        shard, clock = Shard(table, store, 1), 0
        reference = ReferenceRows(table, 5)
        history: list[set[int]] = []
        for before, meanwhile, succeeds, killed in lives:
            for some in before:
                clock += 1
                history.append(some)
                pushed(shard.rows, some, clock)
                pushed(reference, some, clock)
            began = clock
            clock = shard.save(clock, meanwhile, reference, succeeds=succeeds)
            history += meanwhile[: clock - began]
            same(shard.rows, reference, clock)
            if killed and shard.manifest is not None:
                shard = shard.restored(table)
                assert shard.manifest is not None
                for at in range(shard.manifest.version, clock):  # what the checkpoint lacks is pushed again
                    pushed(shard.rows, history[at], at + 1)
                same(shard.rows, reference, clock)
        clock = shard.save(clock, [], reference, succeeds=True)
        assert shard.manifest is not None
        found = {name: [] for name in ("user", "user candidates")}
        for name, rows in iterate_rows(store, shard.manifest):
            found[name] += rows.keys.tolist()
        assert sorted(found["user"]) == sorted(key for key in reference.rows)
        reference._end_rows(clock)
        assert sorted(found["user"]) == sorted(reference.rows)
        assert sorted(found["user candidates"]) == sorted(reference.counted)


def test_memory_of_rows_that_are_gone_is_used_again() -> None:
    rows = TableRows(replace(TABLE, rules=RowRules(evict_unused_steps=2)), 0)
    for clock in range(1, 200):
        pushed(rows, {clock * 10 + one for one in range(10)}, clock)
    assert rows.records.memory.end <= 40
    assert rows.rows <= 40
    assert rows.records.evicted >= 1940


def test_a_full_table_first_frees_what_is_gone() -> None:
    table = replace(TABLE, rows_max=20, keys_per_step_max=10, rules=RowRules(evict_unused_steps=5))
    rows = TableRows(table, 0)
    pushed(rows, set(range(15)), 1)
    with pytest.raises(JobFailed, match="table 'user' has 15 rows on this shard, of at most 20: no room for 10 more"):
        rows.check_room([TEN], 5)
    rows.check_room([TEN], 6)
    assert rows.rows == 0


def test_a_save_is_given_up_where_a_push_needs_the_records_of_rows_that_are_gone() -> None:
    table = replace(TABLE, rows_max=20, keys_per_step_max=10, rules=RowRules(evict_unused_steps=5))
    rows = TableRows(table, 0)
    pushed(rows, set(range(15)), 1)
    saving = rows.records.cut(1, full=True)
    rows.check_room([TEN], 6)
    pushed(rows, set(range(20, 30)), 7)
    assert saving.given_up
    assert rows.pull(EVERY, 7).present.sum() == 10


def test_keys_that_are_counted_take_about_24_bytes() -> None:
    rows = TableRows(replace(TABLE, rows_max=1 << 17, rules=RowRules(admit_after=2)), 0)
    before = rows.memory_bytes
    keys = mixed(np.arange(1 << 16))
    rows.push(keys, np.zeros((len(keys), 3), np.float32), clock=1)
    assert rows.rows == 0
    assert (rows.memory_bytes - before) / len(keys) < 25


def test_a_rule_that_ends_rows_costs_adagrad_nothing_where_no_row_is_gone() -> None:
    table = replace(TABLE, optimizer=Adagrad(0.1))
    plain, ruled = TableRows(table, 0), TableRows(replace(table, rules=RowRules(evict_unused_steps=10**6)), 0)
    for clock in range(1, 5):
        for each in (plain, ruled):
            pushed(each, set(range(clock, clock + 9)), clock)
    assert plain.pull(EVERY, 5).values.tobytes() == ruled.pull(EVERY, 5).values.tobytes()


@pytest.mark.parametrize("counted", [False, True])
def test_a_row_that_begins_anew_beside_a_save_is_saved_as_it_was(counted: bool) -> None:
    rules = RowRules(evict_unused_steps=3, admit_after=9 if counted else 1)
    rows = TableRows(replace(TABLE, rules=rules), 0)
    records_ = rows.saved["user candidates" if counted else "user"]
    for clock in (1, 2):
        pushed(rows, {7}, clock)
    saving = records_.cut(3, full=True)
    due = records_.memory.words[: records_.memory.stride].tobytes()
    pushed(rows, {7}, 8)
    saving.prepare()
    (record,) = next_piece(saving)
    assert record.tobytes() == due
    assert records_.memory.t_of(np.array([0])) == [1]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 10)), min_size=20, max_size=120, unique=True),
    st.data(),
)
def test_a_search_finds_what_lies_behind_keys_that_were_removed(
    keys: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Keys of few homes in one segment, so that they lie in one another's way, and around its end."""
    homes = [0, 1 << 30, 0xFFFFFFFF, 0xFFFFFFFE]  # in the order of 32 bits
    words = np.array([(homes[home] << 10) + (one << 50) for home, one in keys], np.uint64)
    table = Records(RowValues(1, "float32"), {}, 1000, RowRules())
    rows = table.add(words)
    table.use(rows, 1)
    out = np.array(data.draw(st.lists(st.sampled_from(range(len(words))), unique=True, min_size=1)))
    table.remove(rows[out])
    found, absent, _ = table.find(words, 1)
    expected = rows.copy()
    expected[out] = ABSENT
    assert found.tolist() == expected.tolist()
    assert absent == len(out)
    again = table.add(words[out])
    assert table.find(words[out], 1)[0].tolist() == again.tolist()


@pytest.mark.parametrize(("admit_after", "fresh"), [(1, 1000), (1, 800), (2, 1000), (2, 500)])
def test_rows_that_are_gone_do_not_pile_up_however_many_keys_are_new(admit_after: int, fresh: int) -> None:
    rules = RowRules(evict_unused_steps=10, admit_after=admit_after)
    rows = TableRows(replace(TABLE, rows_max=1 << 20, keys_per_step_max=1000, rules=rules), 0)
    begun = 0
    for clock in range(1, 150):
        ids = np.concatenate([np.arange(1000 - fresh), 1000 + begun + np.arange(fresh)])
        begun += fresh
        rows.push(np.sort(mixed(ids)), np.zeros((1000, 3), np.float32), clock=clock)
    alive = 1000 + 10 * fresh
    for records_ in rows.saved.values():
        assert records_.rows <= 2 * alive
        assert records_.memory.end <= 2 * alive


def test_a_save_that_images_end_leaves_no_record_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_saving, "IMAGES_BYTES_LEAST", 0)
    table = replace(TABLE, rows_max=100, keys_per_step_max=80, rules=RowRules(evict_unused_steps=5))
    rows = TableRows(table, 0)
    pushed(rows, set(range(60)), 1)
    pushed(rows, set(range(60, 80)), 5)
    rows.records.cut(5, full=True)
    rows.check_room([np.sort(mixed(np.arange(20, 100)))], 7)  # sweeps: 60 records are kept for the save
    assert rows.records.memory.free == 0
    pushed(rows, set(range(20, 100)), 8)  # images for a quarter of the records are too few
    assert rows.pull(np.sort(mixed(np.arange(100))), 8).present.sum() == 80
    assert rows.records.memory.end <= 100


def test_more_keys_gone_than_are_remembered_make_the_next_save_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "GONE_LEAST", 30)
    rows = TableRows(replace(TABLE, rules=RowRules(evict_unused_steps=2)), 0)
    for clock in range(1, 3):
        pushed(rows, {clock * 10 + one for one in range(10)}, clock)
    assert not rows.records.full_due
    for clock in range(3, 9):
        pushed(rows, {clock * 10 + one for one in range(10)}, clock)
    assert rows.records.full_due
    saving = rows.records.cut(8, full=True)
    assert not rows.records.full_due
    rows.records.end_save(saving, 8, stored=False)
    assert rows.records.full_due


def test_candidates_are_bounded_with_the_rows() -> None:
    rules = RowRules(admit_after=2, evict_above_rows=100)
    rows = TableRows(replace(TABLE, rows_max=250, rules=rules), 0)
    for clock in range(1, 30):
        keys = np.sort(mixed(1000 * clock + np.arange(100)))
        rows.check_room([keys], clock - 1)
        rows.push(keys, np.zeros((100, 3), np.float32), clock=clock)
    assert rows.candidates is not None
    assert rows.candidates.rows <= 100


def test_more_records_moved_than_there_are_make_the_next_save_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that were freed and used again are noted again; what is noted is bounded without any checkpoint."""
    monkeypatch.setattr(records, "MOVED_LEAST", 30)
    rows = TableRows(replace(TABLE, rules=RowRules(evict_unused_steps=2)), 0)
    clock = 0
    while not rows.records.full_due:
        clock += 1
        pushed(rows, {clock * 10 + one for one in range(10)}, clock)
        assert rows.records.moved_rows <= 40
        assert clock < 9
    for _ in range(5):
        clock += 1
        pushed(rows, {clock * 10 + one for one in range(10)}, clock)
        assert rows.records.moved_rows == 0
    saving = rows.records.cut(clock, full=True)
    saving.prepare()
    piece = next_piece(saving)
    assert piece is not None
    assert {clock * 10, clock * 10 - 10} <= set(unmixed(saving.stored(piece).keys).tolist())
    rows.records.end_save(saving, clock, stored=True)
    pushed(rows, {1}, clock + 1)
    assert rows.records.moved_rows == 1
