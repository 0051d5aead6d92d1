"""Building a shard of a job with embedding tables: their rows, by the job's seed or a checkpoint, and their rates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard.checkpoints.row_files import StoredRows
from parashard.checkpoints.state import ShardState
from parashard.errors import DamagedCheckpoint
from parashard.plan.embedding import EmbeddingTable, Keys, cut_by_shard, first_rows, mixed
from parashard.plan.optimizers import SGD, Adagrad
from parashard.plan.partition import Partition
from parashard.plan.variables import Float32s, Initializer
from parashard.protocol.messages import Buffers, PullRun, PushResult, RowSlice
from parashard_server.build import ShardBuilder
from parashard_server.core.shard import Shard
from support.in_process import push_for
from support.shard_process import SEED, VARIABLES, job_reply

SGD_TABLE = {"dimension": 3, "optimizer": {"kind": "sgd", "learning_rate": 0.25}}
ADAGRAD_TABLE = {"dimension": 3, "optimizer": {"kind": "adagrad", "learning_rate": 0.5}}
KEYS = np.sort(mixed(np.arange(20)))
MINE = tuple(KEYS[run] for run in cut_by_shard(KEYS, 2))
"""The keys of each of the plan's two shards."""
ONES = np.ones((20, 3), np.float32)


def builder_of(index: int = 0, *, table: dict[str, Any] | None = None, **of_job: Any) -> ShardBuilder:
    tables = {"user": SGD_TABLE if table is None else table}
    return ShardBuilder(job_reply(**{"steps_total": 10, "tables": tables, **of_job}), index)


def built(index: int = 0, *, state: ShardState | None = None, **of_job: Any) -> Shard:
    return builder_of(index, **of_job).build(incarnation=4, state=state)


def push_rows(shard: Shard, step: int, keys: Keys, gradients: Float32s, **about: Any) -> PushResult:
    whole = push_for(shard, step, np.zeros(shard.storage.elements, np.float32))
    rows = (RowSlice("user", len(keys), gradients.shape[1]),)
    payload = Buffers([*whole.payload.pieces, keys.tobytes(), gradients.tobytes()])
    return shard.push(whole._replace(payload=payload, rows=rows, **about)).result


def rows_of(shard: Shard, keys: Keys, round_: int | None = None) -> Float32s:
    """Return rows, all of which are there."""
    found = shard.pull(PullRun(shard.identity, round_, None, 0, 0, keys={"user": keys})).rows["user"]
    assert found.present.all()
    return found.values.copy()


def moved_by_ones(learning_rate: float | None = None, **of_job: Any) -> Float32s:
    """Return how far a push of ones moves a row, in a step with a learning rate of its own."""
    shard, key = built(**of_job), MINE[0][:1]
    push_rows(shard, 0, key, np.zeros((1, 3), np.float32))
    before = rows_of(shard, key)
    push_rows(shard, 1, key, ONES[:1], learning_rate=learning_rate)
    return rows_of(shard, key) - before


def test_a_job_without_tables_has_shards_without() -> None:
    assert ShardBuilder(job_reply(), 0).build(incarnation=4, state=None).tables is None


def test_a_shard_has_its_share_of_every_table() -> None:
    tables = {"user": SGD_TABLE, "item": {"dimension": 1, "rows_max": 9}}
    for index, buckets in enumerate([(0, 2048), (2048, 4096)]):
        shard = built(index, tables=tables)
        assert shard.tables is not None
        assert (shard.tables.buckets, shard.tables.rows) == (buckets, 0)
        assert {name: rows.table for name, rows in shard.tables.by_name.items()} == {
            "item": EmbeddingTable("item", 1, Adagrad(0.05), Initializer("uniform", 0.05), rows_max=9),
            "user": EmbeddingTable("user", 3, SGD(0.25), Initializer("uniform", 0.05)),
        }


@pytest.mark.parametrize("index", [0, 1])
def test_a_first_push_moves_what_the_jobs_seed_draws(index: int) -> None:  # P27
    shard, keys = built(index), MINE[index]
    assert push_rows(shard, 0, keys, ONES[: len(keys)]) is PushResult.APPLIED
    table = EmbeddingTable("user", 3, SGD(0.25), Initializer("uniform", 0.05))
    assert rows_of(shard, keys).tobytes() == (first_rows(table, SEED)(keys) - np.float32(0.25)).tobytes()


def test_rows_move_with_their_round() -> None:  # P4
    shard, keys = built(consistency="sync:2"), MINE[0]
    assert push_rows(shard, 0, keys, ONES[: len(keys)]) is PushResult.BUFFERED
    push_rows(shard, 1, keys, 2 * ONES[: len(keys)])
    table = EmbeddingTable("user", 3, SGD(0.25), Initializer("uniform", 0.05))
    expected = first_rows(table, SEED)(keys) - np.float32(0.25 * 1.5)
    np.testing.assert_allclose(rows_of(shard, keys, 1), expected, rtol=1e-6)


def test_the_memory_for_pushes_has_room_for_rows() -> None:  # P19
    small = {**SGD_TABLE, "keys_per_step_max": 1}
    large = {**SGD_TABLE, "keys_per_step_max": 1 << 24}
    bytes_ = [builder_of(table=table, queue_bytes=0).push_memory.total_bytes for table in (small, large)]
    assert bytes_[1] > (1 << 24) * (8 + 4 * 3) > bytes_[0]


# --- rates ---


@pytest.mark.parametrize(("consistency", "updates"), [("async", 10), ("sync:4", 3)])
def test_a_tables_schedule_as_long_as_the_job_counts_its_updates(consistency: str, updates: int) -> None:  # P15
    schedule = {"kind": "exponential", "decay_steps": "job", "rate": 0.5}
    shard = built(
        table={"dimension": 3, "optimizer": {"kind": "sgd", "learning_rate": 0.25, "schedule": schedule}},
        consistency=consistency,
    )
    assert shard.tables is not None
    (rows,) = shard.tables.by_name.values()
    assert rows.table.optimizer.schedule.factor(1 + updates) == 0.5


def test_a_steps_own_rate_moves_rows_by_its_share_of_the_jobs() -> None:  # P37
    rate = {"learning_rate": 0.5}
    np.testing.assert_allclose(moved_by_ones(optimizer=rate), -0.25, rtol=1e-5)
    np.testing.assert_allclose(moved_by_ones(1.0, optimizer=rate), 2 * -0.25, rtol=1e-5)
    np.testing.assert_allclose(moved_by_ones(0.125, optimizer=rate), 0.25 * -0.25, rtol=1e-5)


def test_a_rounds_own_rate_does_likewise() -> None:  # P37
    shard, key = built(consistency="sync:1", optimizer={"learning_rate": 0.5}), MINE[0][:1]
    push_rows(shard, 0, key, np.zeros((1, 3), np.float32))
    before = rows_of(shard, key, 1)
    push_rows(shard, 1, key, ONES[:1], learning_rate=1.0)
    np.testing.assert_allclose(rows_of(shard, key, 2) - before, 2 * -0.25, rtol=1e-5)


# --- the state of a checkpoint ---


def state_with(shard: Shard, rows: list[tuple[str, StoredRows]]) -> ShardState:
    """Return what a checkpoint of a shard would hold, with these rows."""
    storage, updates = shard.storage, shard.updates
    values: dict[Partition, Any] = {
        placed.partition: storage.weights[placed.offset : placed.stop].reshape(
            placed.partition.rows, *VARIABLES[placed.partition.variable].shape[1:]
        )
        for placed in storage.layout
    }
    return ShardState(updates.applied.copy(), updates.version, updates.round, values, {}, rows=rows)


def stored(keys: Keys, **slots: Float32s) -> StoredRows:
    values = np.arange(3 * len(keys), dtype=np.float32).reshape(-1, 3)
    counts = np.full(len(keys), 7, np.uint32)
    return StoredRows(keys, counts, counts + np.uint32(2), values, slots)


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_shard_built_from_a_state_has_its_rows(pieces: int) -> None:  # P1
    whole = stored(MINE[1])
    rows = [
        ("user", StoredRows(whole.keys[at], whole.t[at], whole.last_use[at], whole.values[at], {}))
        for at in np.array_split(np.arange(len(MINE[1])), pieces)
    ]
    shard = built(1, state=state_with(built(1), rows))
    assert rows_of(shard, MINE[1]).tobytes() == whole.values.tobytes()
    assert shard.tables is not None
    assert shard.tables.rows == len(MINE[1])


def test_slots_of_rows_go_on_as_they_were() -> None:  # P1
    rows = stored(MINE[0], accumulator=np.full((len(MINE[0]), 3), 15.0, np.float32))
    shard = built(table=ADAGRAD_TABLE, state=state_with(built(table=ADAGRAD_TABLE), [("user", rows)]))
    push_rows(shard, 0, MINE[0], ONES[: len(MINE[0])])
    np.testing.assert_allclose(rows_of(shard, MINE[0]), rows.values - 0.5 / (15.0 + 1.0) ** 0.5, rtol=1e-6)


def test_rows_of_no_table_of_the_job_are_no_state_of_it() -> None:
    with pytest.raises(DamagedCheckpoint, match="rows of table 'artist', which is none of the job's"):
        built(state=state_with(built(), [("artist", stored(MINE[0]))]))
