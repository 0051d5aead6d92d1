"""Rows of tables in the push log: a killed shard has every row of every push that it acknowledged, each once (P18)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import MalformedFrame
from parashard.plan.embedding import Keys, mixed
from parashard.protocol.buffers import Buffers
from parashard.protocol.messages import Push, RowSlice
from parashard.store import open_store
from parashard.store.base import Store
from parashard_server.core.shard import Shard
from parashard_server.state.rows.tables import RowGradients
from support.in_process import push_for
from support.row_pieces import next_piece
from support.shard_process import ADAM, ShardProcess, bits_of, gradient_of
from support.store_fakes import MemoryStore

TABLES = {
    "user": {"dimension": 3, "optimizer": {"kind": "adam", "learning_rate": 0.1}, "rows_max": 1000},
    "word": {"dimension": 1, "admit_after": 2, "evict_unused_steps": 4, "rows_max": 1000},
}
OF_SHARD = np.array([key for key in range(120) if mixed(np.array([key]))[0] < 1 << 63])  # the other half is shard 1's


def process(store: Store, consistency: str = "async", *, log: bool = True, **checkpoint: Any) -> ShardProcess:
    options = {"every_s": 3600.0, "durability": "log" if log else "checkpoint", "log_fsync": False, **checkpoint}
    return ShardProcess(store, optimizer=ADAM, consistency=consistency, checkpoint=options, tables=TABLES)


def keys_of(step: int, count: int) -> Keys:
    return np.sort(mixed(np.random.default_rng(step).choice(OF_SHARD[:12], count, replace=False)))


def with_rows(shard: Shard, step: int) -> Push:
    """Return a step's push, for one table, both or none."""
    dense = push_for(shard, step, gradient_of(shard, step))
    pieces, slices = [], []
    for name, count in (("user", step % 3), ("word", step % 2 * 3)):
        if count:
            keys, elements = keys_of(step, count), TABLES[name]["dimension"]
            values = np.random.default_rng(step).normal(size=(count, elements)).astype(np.float32)
            pieces += [keys, values]
            slices.append(RowSlice(name, count, elements))
    return dense._replace(payload=Buffers([*dense.payload.pieces, *pieces]), rows=tuple(slices))


def pushed(served: ShardProcess, steps: Iterable[int]) -> None:
    for step in steps:
        served.shard.push(with_rows(served.shard, step))
        served.checkpointer.look(served.shard)


def everything(shard: Shard) -> tuple[Any, ...]:
    """Return weights, and of each table rows, slots, counts and times of last use, candidates among them."""
    assert shard.tables is not None
    rows = {}
    for name, records in shard.tables._saved.items():
        saving = records.cut(shard.updates.version, whole=True)
        saving.prepare()
        piece = next_piece(saving)
        rows[name] = b"" if piece is None else piece.tobytes()
    return bits_of(shard), rows


@pytest.mark.parametrize("consistency", ["async", "ssp:8", "sync:4"])
def test_a_killed_shard_has_the_rows_of_every_push(tmp_path: Path, consistency: str) -> None:
    first = process(open_store(str(tmp_path)), consistency)
    pushed(first, range(14))
    first.close()
    second = process(open_store(str(tmp_path)), consistency)
    undisturbed = process(MemoryStore(), consistency, log=False)
    pushed(undisturbed, range(14))
    assert "replayed 14 steps" in second.host.restored
    for shard in (second, undisturbed):
        pushed(shard, range(14, 17))  # in rounds: those that waited have their rows, too
    assert everything(second.shard) == everything(undisturbed.shard)
    second.close()


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), min_size=1, max_size=5), st.booleans())
def test_whatever_is_saved_and_whenever_it_dies_the_rows_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[int, bool, bool]], rounds: bool
) -> None:
    store, consistency, step = open_store(str(tmp_path_factory.mktemp("store"))), "sync:2" if rounds else "async", 0
    served = process(store, consistency)
    for steps, saves, dies in lives:
        pushed(served, range(step, step + steps))
        step += steps
        if saves:
            served.checkpointer.take(served.shard.updates.round)
        if dies:
            served.close()
            served = process(store, consistency)
    undisturbed = process(MemoryStore(), consistency, log=False)
    pushed(undisturbed, range(step))
    assert everything(served.shard) == everything(undisturbed.shard)
    served.close()


def test_a_log_with_rows_is_not_for_a_job_without_tables() -> None:
    shard = ShardProcess(MemoryStore(), optimizer=ADAM).shard
    rows = {"user": RowGradients(keys_of(1, 1), np.ones((1, 3), np.float32))}
    with pytest.raises(MalformedFrame, match="this job has no tables"):
        shard.replay(0, 1, gradient_of(shard, 1), None, skipped=False, rows=rows)
