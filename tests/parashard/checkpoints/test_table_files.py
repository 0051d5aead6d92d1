"""Rows of tables in checkpoint files: what was written comes back, of the buckets asked for, or the damage is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.checkpoints.encoding import sha256_of
from parashard.checkpoints.manifest import ShardManifest, StoredFile
from parashard.checkpoints.tables import StoredRows, iterate_tables, within, write_tables
from parashard.errors import DamagedCheckpoint
from parashard.plan.embedding import BUCKETS, bucket_ranges, buckets_of, mixed
from parashard.store.arrays import from_bytes, to_bytes
from support.store_fakes import MemoryStore

FOLDER = "shards/p0001/s0000/i00000001-c00000001"


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


def stored(store: MemoryStore, tables: dict[str, StoredRows], file_bytes: int = 1 << 20) -> ShardManifest:
    files = write_tables(store, FOLDER, tables.items(), file_bytes=file_bytes)
    return ShardManifest(
        run_id="r",
        job_digest="0" * 64,
        plan_version=1,
        shard=0,
        incarnation=1,
        number=1,
        round=None,
        version=0,
        applied=(),
        slots=(),
        partitions=(),
        files=tuple(files),
        log_position=None,
        written_at=0.0,
        tables=tuple((name, len(rows.keys)) for name, rows in tables.items()),
    )


@pytest.mark.parametrize("file_bytes", [1, 1000, 1 << 20])
def test_rows_come_back_as_they_were_from_files_of_bounded_size(store: MemoryStore, file_bytes: int) -> None:
    tables = {"user": rows_of(100), "item": rows_of(7, 8, seed=1)}
    manifest = stored(store, tables, file_bytes)
    found: dict[str, list[StoredRows]] = {}
    for name, rows in iterate_tables(store, manifest):
        found.setdefault(name, []).append(rows)
    assert {name: bits(joined(parts)) for name, parts in found.items()} == {
        name: bits(rows) for name, rows in tables.items()
    }
    assert len(manifest.files) == {1: 107, 1000: 5, 1 << 20: 2}[file_bytes]


@given(st.integers(0, 200), st.integers(1, 9))
def test_each_shard_finds_the_rows_of_its_buckets(number: int, shards: int) -> None:
    rows = rows_of(number)
    found = [list(within([("user", rows)], buckets)) for buckets in bucket_ranges(shards)]
    for (begin, end), parts in zip(bucket_ranges(shards), found, strict=True):
        assert all(((begin <= buckets_of(part.keys)) & (buckets_of(part.keys) < end)).all() for _, part in parts)
    assert [key for parts in found for _, part in parts for key in part.keys.tolist()] == rows.keys.tolist()
    assert list(within([("user", rows)], (BUCKETS, BUCKETS))) == []


def test_a_manifest_without_tables_is_written_as_before() -> None:
    assert "tables" not in stored(MemoryStore(), {}).plain()


def changed(store: MemoryStore, manifest: ShardManifest, **arrays: np.ndarray) -> ShardManifest:
    """Return a manifest of the first file with some arrays of table "user" in place of its own."""
    name = f"{FOLDER}/{manifest.files[0].name}"
    whole = from_bytes(store.read(name, 1 << 20)) | {f"user/{part}": array for part, array in arrays.items()}
    store.delete(name)
    content = to_bytes(whole)
    store.create(name, content)
    file = StoredFile(name=manifest.files[0].name, size_bytes=len(content), sha256=sha256_of(content))
    return manifest.replaced(files=(file,))


ROWS = rows_of(10)
DAMAGES = {
    "keys not ascending": {"keys": ROWS.keys[::-1].copy()},
    "a key twice": {"keys": np.repeat(ROWS.keys[:5], 2)},
    "keys as numbers": {"keys": ROWS.keys.astype(np.float32)},
    "too few counts": {"t": ROWS.t[1:].copy()},
    "a row too many": {"values": np.zeros((11, 3), np.float32)},
    "a slot of another shape": {"slot:accumulator": np.zeros((10, 4), np.float32)},
    "no rows": {"keys": ROWS.keys[:0], "t": ROWS.t[:0], "last_use": ROWS.t[:0], "values": ROWS.values[:0]},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_arrays_that_do_not_fit_each_other_are_damage(store: MemoryStore, damage: str) -> None:
    manifest = changed(store, stored(store, {"user": ROWS}), **DAMAGES[damage])
    with pytest.raises(DamagedCheckpoint, match="do not fit each other"):
        list(iterate_tables(store, manifest))


def test_more_or_fewer_rows_than_the_manifest_says_are_damage(store: MemoryStore) -> None:
    manifest = stored(store, {"user": ROWS})
    for number, says in ((11, "1 rows of table 'user' are in no file"), (9, "more rows of table 'user'")):
        with pytest.raises(DamagedCheckpoint, match=says):
            list(iterate_tables(store, manifest.replaced(tables=(("user", number),))))


def test_files_in_another_order_are_damage(store: MemoryStore) -> None:
    manifest = stored(store, {"user": ROWS}, file_bytes=200)
    with pytest.raises(DamagedCheckpoint, match="do not go on from the file before"):
        list(iterate_tables(store, manifest.replaced(files=manifest.files[::-1])))


def test_a_flipped_bit_is_damage(store: MemoryStore) -> None:
    manifest = stored(store, {"user": ROWS})
    name = f"{FOLDER}/{manifest.files[0].name}"
    content = bytearray(store.read(name, 1 << 20))
    content[-5] ^= 1
    store.delete(name)
    store.create(name, bytes(content))
    with pytest.raises(DamagedCheckpoint, match="SHA-256"):
        list(iterate_tables(store, manifest))
