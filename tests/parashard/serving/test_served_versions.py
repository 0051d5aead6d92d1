"""Which version follows which, how far behind one is, and whose shard a key is looked up in."""

from __future__ import annotations

import numpy as np
import pytest

from parashard.checkpoints.catalogue import CheckpointId
from parashard.client.pulled_rows import TableSet
from parashard.errors import UnknownVariable
from parashard.plan.embedding import EmbeddingTable, bucket_ranges, mixed
from parashard.plan.optimizers import SGD
from parashard.plan.variables import Initializer
from parashard.serving.published_rows import PublishedRows, RowChange
from parashard.serving.versions import Behind, PublishedShard, PublishedTable, ShardVersion, behind, follows, look_up


def version(shard: int = 0, number: int = 1, steps: int = 5, incarnation: int = 1, at: float = 100.0) -> ShardVersion:
    return ShardVersion(CheckpointId(1, shard, incarnation, number), steps, ((0, steps),) if steps else (), at)


@pytest.mark.parametrize(
    ("later", "due"),
    [
        (version(number=2), True),
        (version(number=2, steps=6), True),
        (version(number=2, steps=4), False),
        (version(number=1, steps=6), False),
        (version(number=1, steps=6, incarnation=2), True),
        (version(number=9, steps=6, incarnation=0), False),
    ],
)
def test_a_version_follows_one_that_is_earlier_and_whose_steps_it_has(later: ShardVersion, due: bool) -> None:
    assert follows(later, version()) is due


def test_behind_counts_checkpoints_of_the_furthest_shard_and_the_age_of_the_oldest() -> None:
    held = [version(0, 3, at=90.0), version(1, 7, at=95.0)]
    newest = [CheckpointId(1, 0, 1, 4), CheckpointId(1, 1, 2, 9)]
    assert behind(held, newest, None, 100.0) == Behind(2, 10.0)
    assert behind(held, [one.id for one in held], None, 100.0) == Behind(0, 10.0)


def test_at_the_end_of_the_job_nothing_is_behind() -> None:
    held = [version(0), version(1)]
    assert behind(held, [one.id for one in held], 5, 100000.0) == Behind(0, 0.0)
    assert behind(held, [one.id for one in held], 6, 101.0) == Behind(0, 1.0)


def test_a_newer_plan_is_ahead_by_a_version_at_least() -> None:
    assert behind([version(0, 3)], [CheckpointId(2, 0, 1, 1)], None, 100.0).versions == 1


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_each_key_is_looked_up_in_its_shard(shards: int) -> None:
    """The edges of the ranges, too: each shard has a row for every key, and its own number in it."""
    edges = [start << 52 for start, _ in bucket_ranges(shards)]
    keys = np.array(sorted({*edges, *[edge - 1 for edge in edges if edge], *mixed(np.arange(50)).tolist()}), np.uint64)

    def shard(number: int) -> PublishedShard:
        values = np.full((len(keys), 2), number, np.float32)
        change = RowChange(keys, values, np.zeros(len(keys), np.uint32), np.empty(0, np.uint64))
        rows = PublishedRows.empty(2).with_change(change, 1)
        return PublishedShard(version(number), {}, {"user": PublishedTable(rows)})

    tables = TableSet((EmbeddingTable("user", 2, SGD(learning_rate=1.0)),))
    found = look_up(tables, [shard(number) for number in range(shards)], "user", keys[::-1])
    due = [
        next(n for n, (start, stop) in enumerate(bucket_ranges(shards)) if start <= int(key) >> 52 < stop)
        for key in keys[::-1]
    ]
    assert found.rows[:, 0].tolist() == due
    assert found.present.all()


def test_a_key_without_a_row_has_its_first_values() -> None:
    table = EmbeddingTable("user", 4, SGD(learning_rate=1.0), Initializer("normal", 0.1))
    tables = TableSet((table,), seed=3)
    empty = PublishedShard(version(), {}, {"user": PublishedTable(PublishedRows.empty(4))})
    keys = mixed([5, 5, 6])
    found = look_up(tables, [empty], "user", keys)
    assert found.rows.tobytes() == tables.first_rows("user", keys).tobytes()
    assert found.rows.any()
    assert not found.present.any()
    with pytest.raises(UnknownVariable, match="table 'item' is none of the job's: user"):
        look_up(tables, [empty], "item", keys)
