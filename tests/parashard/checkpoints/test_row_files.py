"""Rows of tables in checkpoint files: what was written last comes back, of the buckets asked for, or damage is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.encoding import encode, sha256_of
from parashard.checkpoints.manifest import ShardManifest
from parashard.checkpoints.retention import collect
from parashard.checkpoints.row_files import StoredRows, TableChange, TableWriter, iterate_rows
from parashard.errors import DamagedCheckpoint
from parashard.plan.embedding import BUCKETS, Keys, bucket_ranges, buckets_of, mixed
from parashard.store.arrays import from_bytes, to_bytes
from support.store_fakes import MemoryStore

NONE: Keys = np.empty(0, np.uint64)


def rows_of(number: int, row_elements: int = 3, seed: int = 0) -> StoredRows:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(2, number, row_elements)).astype(np.float32)
    counts = rng.integers(1, 9, (2, number)).astype(np.uint32)
    keys = np.sort(mixed(np.arange(seed * 1_000_000, seed * 1_000_000 + number)))
    return StoredRows(keys, counts[0], counts[1], values[0], {"accumulator": values[1]})


def bits(rows: StoredRows) -> list[bytes]:
    return [array.tobytes() for array in (*rows[:4], *rows.slots.values())]


def joined(parts: list[StoredRows]) -> StoredRows:
    slots = {name: np.concatenate([part.slots[name] for part in parts]) for name in parts[0].slots}
    return StoredRows(*(np.concatenate(arrays) for arrays in zip(*(part[:4] for part in parts), strict=True)), slots)


def manifest_of(number: int, files: list, counts: dict[str, int]) -> ShardManifest:
    return ShardManifest(
        run_id="r",
        job_digest="0" * 64,
        plan_version=1,
        shard=0,
        incarnation=1,
        number=number,
        round=None,
        version=0,
        applied=(),
        slots=(),
        partitions=(),
        files=(),
        written_at=0.0,
        tables=tuple(sorted(counts.items())),
        table_files=tuple(files),
    )


def stored(store: MemoryStore, tables: dict[str, StoredRows], at_once: int = 1000) -> ShardManifest:
    """Write tables, so many rows a file."""
    writer = TableWriter(store, CheckpointId(1, 0, 1, 1))
    for name, rows in tables.items():
        for begin in range(0, len(rows.keys), at_once):
            writer.write(TableChange(name, rows.taken(slice(begin, begin + at_once)), NONE))
    return manifest_of(1, writer.files, {name: len(rows.keys) for name, rows in tables.items() if len(rows.keys)})


@pytest.mark.parametrize("at_once", [1, 30, 1000])
def test_rows_come_back_as_they_were_from_several_files(store: MemoryStore, at_once: int) -> None:
    tables = {"user": rows_of(100), "item": rows_of(7, 8, seed=1)}
    found: dict[str, list[StoredRows]] = {}
    for name, rows in iterate_rows(store, stored(store, tables, at_once)):
        found.setdefault(name, []).append(rows)
    assert {name: bits(joined(parts)) for name, parts in found.items()} == {
        name: bits(rows) for name, rows in tables.items()
    }


@given(st.integers(0, 200), st.integers(1, 9))
def test_each_shard_finds_the_rows_of_its_buckets(number: int, shards: int) -> None:
    store, rows = MemoryStore(), rows_of(number)
    manifest = stored(store, {"user": rows}, 40)
    found = [list(iterate_rows(store, manifest, buckets)) for buckets in bucket_ranges(shards)]
    for (begin, end), parts in zip(bucket_ranges(shards), found, strict=True):
        assert all(((begin <= buckets_of(part.keys)) & (buckets_of(part.keys) < end)).all() for _, part in parts)
    assert [key for parts in found for _, part in parts for key in part.keys.tolist()] == rows.keys.tolist()
    assert list(iterate_rows(store, manifest, (BUCKETS, BUCKETS))) == []


def test_files_without_a_wanted_row_are_not_read(store: MemoryStore) -> None:
    manifest = stored(store, {"user": rows_of(100)}, 10)
    for file in manifest.table_files[5:]:
        store.delete(f"{CheckpointId(1, 0, 1, 1).folder}/{file.name}")
    last = manifest.table_files[4].buckets[1] - 1
    assert sum(len(rows.keys) for _, rows in iterate_rows(store, manifest, (0, last))) > 30


layers = st.lists(
    st.tuples(st.lists(st.integers(0, 30), unique=True), st.lists(st.integers(0, 30), unique=True)),
    min_size=1,
    max_size=5,
)


@given(layers, st.integers(1, 7))
def test_of_what_several_checkpoints_wrote_the_last_counts(written: list, at_once: int) -> None:  # P33
    """Each of them has rows, and keys whose rows are gone; a dictionary says what is left."""
    store = MemoryStore()
    files, due = [], {}
    for number, (there, others) in enumerate(written, 1):
        writer = TableWriter(store, CheckpointId(1, 0, 1, number))
        gone = sorted(set(others) - set(there), key=lambda key: int(mixed(key)[0]))
        rows = rows_of(31, seed=number)
        rows = rows._replace(keys=np.sort(mixed(np.arange(31))))
        rows = rows.taken(np.isin(rows.keys, mixed(np.array(there, np.int64))))
        for begin in range(0, len(rows.keys), at_once):
            writer.write(TableChange("user", rows.taken(slice(begin, begin + at_once)), NONE))
        if gone:
            writer.write(TableChange("user", rows.taken(slice(0, 0)), np.concatenate([mixed(key) for key in gone])))
        files += writer.files
        due |= dict(zip(rows.keys.tolist(), map(bytes, rows.values), strict=True))
        for key in gone:
            due.pop(int(mixed(key)[0]), None)
    manifest = manifest_of(len(written), files, {"user": len(due)} if due else {})
    found = [
        (key, bytes(row))
        for _, rows in iterate_rows(store, manifest)
        for key, row in zip(rows.keys.tolist(), rows.values, strict=True)
    ]
    assert sorted(found) == sorted(due.items())


def test_files_stay_as_long_as_a_manifest_names_them(store: MemoryStore) -> None:  # P12, P33
    catalogue, base = Catalogue(store), stored(store, {"user": rows_of(100)}, 60)
    writer = TableWriter(store, CheckpointId(1, 0, 1, 2))
    writer.write(TableChange("user", rows_of(3), NONE))
    later = manifest_of(2, [*base.table_files, *writer.files], {"user": 100})
    for manifest in (base, later):
        store.create(CheckpointId.of(manifest).manifest_name, encode(manifest))
    collect(catalogue, CheckpointId.of(base))
    assert sum(len(rows.keys) for _, rows in iterate_rows(store, later)) == 100
    collect(catalogue, CheckpointId.of(later))
    assert store.names("shards/p0001/s0000/i00000001-c00000001") == []
    assert store.names("shards/p0001/s0000/i00000001-c00000002") == []


def test_a_manifest_without_tables_is_written_as_before() -> None:
    plain = stored(MemoryStore(), {}).plain()
    assert "tables" not in plain
    assert "table_files" not in plain


def changed(store: MemoryStore, manifest: ShardManifest, **arrays: np.ndarray) -> ShardManifest:
    """Return a manifest of the first file with some arrays of table "user" in place of its own."""
    file = manifest.table_files[0]
    name = f"{CheckpointId.of(manifest).folder}/{file.name}"
    whole = from_bytes(store.read(name, 1 << 20)) | {f"user/{part}": array for part, array in arrays.items()}
    store.delete(name)
    content = to_bytes(whole)
    store.create(name, content)
    return manifest.replaced(table_files=(file.replaced(size_bytes=len(content), sha256=sha256_of(content)),))


ROWS = rows_of(10)
DAMAGES = {
    "keys not ascending": {"keys": ROWS.keys[::-1].copy()},
    "a key twice": {"keys": np.repeat(ROWS.keys[:5], 2)},
    "keys as numbers": {"keys": ROWS.keys.astype(np.float32)},
    "too few counts": {"t": ROWS.t[1:].copy()},
    "a row too many": {"values": np.zeros((11, 3), np.float32)},
    "a slot of another shape": {"slot:accumulator": np.zeros((10, 4), np.float32)},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_arrays_that_do_not_fit_each_other_are_damage(store: MemoryStore, damage: str) -> None:
    manifest = changed(store, stored(store, {"user": ROWS}), **DAMAGES[damage])
    with pytest.raises(DamagedCheckpoint, match="do not fit each other"):
        list(iterate_rows(store, manifest))


def test_more_or_fewer_rows_than_the_manifest_says_are_damage(store: MemoryStore) -> None:
    manifest = stored(store, {"user": ROWS})
    for number in (11, 9):
        with pytest.raises(
            DamagedCheckpoint, match=f"have {{'user': 10}} rows, the manifest says {{'user': {number}}}"
        ):
            list(iterate_rows(store, manifest.replaced(tables=(("user", number),))))
    file = manifest.table_files[0].replaced(rows=9)
    with pytest.raises(DamagedCheckpoint, match="10 rows of table 'user', where the manifest says 9 of 'user'"):
        list(iterate_rows(store, manifest.replaced(table_files=(file,))))


def test_a_flipped_bit_is_damage(store: MemoryStore) -> None:
    manifest = stored(store, {"user": ROWS})
    name = f"{CheckpointId.of(manifest).folder}/{manifest.table_files[0].name}"
    content = bytearray(store.read(name, 1 << 20))
    content[-5] ^= 1
    store.delete(name)
    store.create(name, bytes(content))
    with pytest.raises(DamagedCheckpoint, match="SHA-256"):
        list(iterate_rows(store, manifest))
