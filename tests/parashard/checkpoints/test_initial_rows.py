"""Rows that a job begins with: each shard reads its own of them, from whatever number of files (P27)."""

from __future__ import annotations

import numpy as np
import pytest

from parashard.checkpoints import row_files
from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.row_files import iterate_initial_rows
from parashard.checkpoints.state import initial_sha256
from parashard.errors import DamagedCheckpoint
from parashard.plan.embedding import KeyedRows, bucket_ranges, mixed
from parashard.plan.variables import values_sha256
from parashard_coordinator.run.store import RunStore
from support.store_fakes import MemoryStore

DIGEST = "d" * 64
ARRAYS = {"bias": np.zeros(1, np.float32)}


def rows_of(count: int, dimension: int) -> KeyedRows:
    keys = np.sort(mixed(np.arange(count)))
    return KeyedRows(keys, np.random.default_rng(count).normal(size=(count, dimension)).astype(np.float32))


ROWS = {"item": rows_of(50, 3), "user": rows_of(300, 2)}


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    monkeypatch.setattr(row_files, "FILE_BYTES", 1 << 10)
    store = MemoryStore()
    RunStore(store, 2).keep_initial(DIGEST, ARRAYS, ROWS)
    return store


@pytest.mark.parametrize("shards", [1, 3])
def test_each_shard_has_its_own_and_together_they_have_all(stored: MemoryStore, shards: int) -> None:
    assert sum("tables-" in name for name in stored.contents) > 2
    found: dict[str, list[KeyedRows]] = {"item": [], "user": []}
    for buckets in bucket_ranges(shards):
        for name, rows in iterate_initial_rows(stored, DIGEST, buckets):
            found[name].append(rows)
    for name, due in ROWS.items():
        assert np.concatenate([rows.keys for rows in found[name]]).tolist() == due.keys.tolist()
        assert np.concatenate([rows.values for rows in found[name]]).tobytes() == due.values.tobytes()


def test_the_digest_of_what_a_job_begins_with_is_of_the_rows_too(stored: MemoryStore) -> None:
    manifest = Catalogue(stored).initial_manifest(DIGEST)
    assert manifest is not None
    assert manifest.sha256 == initial_sha256(ARRAYS, ROWS) != initial_sha256(ARRAYS, {**ROWS, "user": rows_of(299, 2)})
    assert initial_sha256(ARRAYS, {}) == values_sha256(ARRAYS), "of jobs without it is what it was"


def test_a_file_with_another_bit_is_refused(stored: MemoryStore) -> None:
    name = next(name for name in stored.contents if "tables-1" in name)
    stored.contents[name] = stored.contents[name][:-1] + b"\1"
    with pytest.raises(DamagedCheckpoint, match=r"tables-1\.safetensors: SHA-256"):
        list(iterate_initial_rows(stored, DIGEST))


def test_a_job_that_begins_with_none_has_none() -> None:
    assert list(iterate_initial_rows(MemoryStore(), DIGEST)) == []
