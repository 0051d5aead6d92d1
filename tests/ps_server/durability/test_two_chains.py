"""Two chains of checkpoints with rows are kept: where a file of the newer is damaged, a shard has the older (P33)."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest

from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.retention import CommonRounds
from parashard.checkpoints.row_files import iterate_rows
from parashard.checkpoints.verify import damage_in_store, restarts_from
from parashard.errors import StoreFailed
from parashard.plan.embedding import Keys, cut_by_shard, mixed
from parashard.plan.intervals import IntervalSet
from parashard.protocol.messages import Buffers, RowSlice
from parashard_coordinator.core.calls import Announcement
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.core.rounds import Rounds
from parashard_server.state.rows import embedding_tables as rows
from parashard_server.state.rows.embedding_tables import CHAIN_MAX
from support.checkpoint_cases import write_plan
from support.in_process import push_for
from support.shard_process import COUNTING, PLAN, ShardProcess
from support.store_fakes import MemoryStore

TABLE = {"dimension": 1, "optimizer": COUNTING, "initializer": "zeros"}
KEYS = np.sort(mixed(np.arange(200)))
MINE = tuple(KEYS[run] for run in cut_by_shard(KEYS, 2))
STEPS = 40


def process(store: MemoryStore, index: int = 0, *, keep: int = 1, consistency: str = "async") -> ShardProcess:
    options = {"every_s": 0.0, "every_steps": 1, "keep": keep}
    shard = ShardProcess(
        store, index, optimizer=COUNTING, consistency=consistency, checkpoint=options, tables={"seen": TABLE}
    )
    shard.checkpointer.saved.common = CommonRounds(None, frozenset())  # what a job without rounds is told
    return shard


def used_by(step: int, index: int = 0) -> Keys:
    """Return the keys of a step: all at first, then one, so that increments are small."""
    return MINE[index] if step == 0 else MINE[index][step : step + 1]


def pushed(shard: ShardProcess, *steps: int) -> None:
    """Push steps, whose rows count them, and save after each."""
    index = shard.shard.identity.shard
    for step in steps:
        keys = used_by(step, index)
        whole = push_for(shard.shard, step, np.zeros(shard.shard.storage.elements, np.float32))
        payload = Buffers([*whole.payload.pieces, keys.tobytes(), np.ones((len(keys), 1), np.float32).tobytes()])
        shard.shard.push(whole._replace(payload=payload, rows=(RowSlice("seen", len(keys), 1),)))
        shard.checkpointer.cut_if_due(shard.shard)
        shard.checkpointer.save_pending()


def ledger(shard: ShardProcess) -> dict[int, float]:
    """Return how often each key was pushed, as the rows say."""
    index, tables = shard.shard.identity.shard, shard.shard.tables
    assert tables is not None
    found = tables.pull({"seen": MINE[index]}, shard.shard.updates.version)["seen"]
    return dict(zip(MINE[index][found.present].tolist(), found.values[:, 0].tolist(), strict=True))


def due(steps: int, index: int = 0) -> dict[int, float]:
    found = dict.fromkeys(MINE[index].tolist(), 0.0)
    for step in range(steps):
        for key in used_by(step, index).tolist():
            found[key] += 1.0
    return found


def base_files(shard: ShardProcess) -> list[str]:
    """Return the files that the newest checkpoint's chain began with."""
    newest = shard.catalogue.shard_checkpoints(5, shard.shard.identity.shard)[-1]
    files = shard.catalogue.manifest(newest).table_files
    first = min((file.incarnation, file.number) for file in files)
    folder = f"shards/p0005/s{newest.shard:04d}/i{first[0]:08d}-c{first[1]:08d}"
    return [f"{folder}/{file.name}" for file in files if (file.incarnation, file.number) == first]


def damage(store: MemoryStore, name: str) -> None:
    store.contents[name] = store.contents[name][:-1] + b"?"


def missing(shard: ShardProcess, steps: int) -> list[int]:
    return [step for start, stop in shard.shard.updates.applied.missing(0, steps) for step in range(start, stop)]


def test_the_newest_checkpoint_of_the_chain_before_is_kept_and_no_third_chain(store: MemoryStore) -> None:
    shard = process(store)
    seen = set()
    for step in range(STEPS):
        pushed(shard, step)
        manifests = [shard.catalogue.manifest(id_) for id_ in shard.catalogue.checkpoints()]
        chains = {min(file.number for file in manifest.table_files) for manifest in manifests}
        assert len(manifests) == len(chains) <= 2
        seen |= chains
        named = {(file.number, file.name) for manifest in manifests for file in manifest.table_files}
        assert len([name for name in store.contents if "/tables-" in name]) == len(named), "nothing else is left"
    assert sorted(seen) == [1, CHAIN_MAX + 1, 2 * CHAIN_MAX + 1]
    assert shard.numbers() == [2 * CHAIN_MAX, STEPS]


def test_a_damaged_base_costs_what_is_newer_than_the_chain_before_and_that_is_computed_again(
    store: MemoryStore,
) -> None:
    shard = process(store, keep=3)
    pushed(shard, *range(22))
    assert shard.numbers() == [CHAIN_MAX, 20, 21, 22]
    [base] = base_files(shard)
    damage(store, base)
    write_plan(store, PLAN)
    damaged: set[Any] = set()
    texts = list(damage_in_store(shard.catalogue, damaged))
    assert [base in text for text in texts] == [True] * 3, "of each checkpoint that names the file"
    assert list(restarts_from(shard.catalogue, damaged)) == [
        f"shard 0 restarts from p5/s0/i1/c{CHAIN_MAX}, with 16 of 22 steps; what is newer is computed again"
    ]

    again = process(store, keep=3)
    assert again.host.restored.startswith(f"restored p5/s0/i1/c{CHAIN_MAX} with 16 steps; skipped p5/s0/i1/c22")
    assert (ledger(again), missing(again, 22)) == (due(16), list(range(16, 22)))
    pushed(again, *missing(again, 22))
    assert ledger(again) == due(22)
    third = process(store)
    assert (ledger(third), missing(third, 22)) == (due(22), [])


def test_after_that_the_next_checkpoint_begins_a_chain(store: MemoryStore) -> None:
    shard = process(store)
    pushed(shard, *range(20))
    [base] = base_files(shard)
    damage(store, base)
    again = process(store)
    pushed(again, 16)
    newest = again.catalogue.manifest(again.catalogue.checkpoints()[-1])
    assert newest.own_table_files == newest.table_files
    for name in [name for name in store.contents if f"c{CHAIN_MAX:08d}/" in name]:
        damage(store, name)
    assert ledger(process(store)) == due(17), "it needs nothing of the chain that it came from"


def test_damaged_ones_go_and_are_never_taken_for_the_chain_before(store: MemoryStore) -> None:
    shard = process(store)
    pushed(shard, *range(20))
    [base] = base_files(shard)
    damage(store, base)
    again = process(store)
    assert again.stored()[-1] == "p5/s0/i1/c20", "nothing is deleted at the start"
    fault = store.fail("create", "manifest")
    pushed(again, 16)
    assert (fault.fired, again.stored()) == (1, [f"p5/s0/i1/c{CHAIN_MAX}"]), "before another one is there"
    again.now_s += 60.0
    pushed(again, 17)
    assert again.stored() == [f"p5/s0/i1/c{CHAIN_MAX}", f"p5/s0/i2/c{CHAIN_MAX + 2}"]
    assert base not in store.contents
    [base] = base_files(process(store))
    damage(store, base)
    assert ledger(process(store)) == due(16), "the chain before the damaged one is there still"


def test_damaged_ones_stay_where_nothing_else_is(store: MemoryStore) -> None:
    shard = process(store)
    pushed(shard, *range(3))
    [base] = base_files(shard)
    damage(store, base)
    again = process(store)
    assert again.host.restored.startswith("initial values; skipped p5/s0/i1/c3")
    pushed(again, 0)
    assert again.stored() == ["p5/s0/i1/c3", "p5/s0/i2/c1"]


def test_before_there_is_a_second_chain_nothing_more_is_kept(store: MemoryStore) -> None:
    shard = process(store, keep=2)
    pushed(shard, *range(5))
    assert shard.numbers() == [4, 5]


def test_a_full_disk_takes_the_chain_before(store: MemoryStore) -> None:
    shard = process(store)
    pushed(shard, *range(20))
    assert shard.numbers() == [CHAIN_MAX, 20]
    error = StoreFailed("no space left on device")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    fault = store.fail("create", "/variables", error=error)
    pushed(shard, 20)
    assert (fault.fired, shard.numbers()) == (1, [CHAIN_MAX, 20])
    store.calls.clear()
    shard.now_s += 60.0
    pushed(shard, 21)
    changes = [(operation, name) for operation, name in store.calls if operation in ("create", "delete")]
    assert changes[0] == ("delete", f"{shard.id_of(CHAIN_MAX).manifest_name}"), "before the next is written"
    assert shard.numbers() == [22]


def test_rows_that_a_coordinator_found_damaged_are_written_anew(store: MemoryStore) -> None:  # P7
    shard = process(store)
    pushed(shard, *range(3))
    stored = shard.checkpointer.take()
    [base] = base_files(shard)
    damage(store, base)
    again = shard.checkpointer.take(damaged=CheckpointId.of(stored).folder)
    manifest = shard.catalogue.manifest(CheckpointId.of(again))
    assert manifest.own_table_files == manifest.table_files
    assert sum(len(rows.keys) for _, rows in iterate_rows(store, manifest)) == len(MINE[0])
    pushed(shard, 3)
    assert shard.numbers() == [4, 5], "the one that was handed out goes with the next"


class Job:
    """Shards of a `sync:1` job, the coordinator's book of their rounds, and announcements that a test orders."""

    def __init__(self, store: MemoryStore) -> None:
        self.shards = [process(store, index, consistency="sync:1") for index in range(2)]
        self.book = Rounds(2, 1, STEPS, 0.0)

    def announce(self, index: int) -> None:
        shard = self.shards[index]
        returnable, chains = shard.lifecycle.saved_rounds()
        applied = shard.shard.updates.applied.copy()
        incarnation = shard.shard.identity.incarnation
        says = Announcement(
            ShardRegistration(incarnation, "host:1", ""),
            applied,
            applied,
            IntervalSet(),
            frozenset(returnable),
            chains=frozenset(chains),
        )
        self.book.note_progress(index, says)
        shard.checkpointer.saved.common = CommonRounds(self.book.common_cut(), frozenset(self.book.kept_rounds()))

    def round(self, round_: int, index: int) -> None:
        """Let a shard take the round's only step, and save the next one's start."""
        pushed(self.shards[index], round_)
        self.shards[index].reach(round_ + 1)
        self.shards[index].checkpointer.save_pending()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("rounds", [6, 7, 8, 11])
def test_in_rounds_all_shards_keep_what_one_may_have_to_return_to(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, first: int, rounds: int
) -> None:
    """Shards whose chains begin at different rounds, with keep = 1, whichever of them announces first."""
    monkeypatch.setattr(rows, "CHAIN_MAX", 4)
    job = Job(store)
    job.shards[1].checkpointer._number = 5  # as after failures of the store
    for round_ in range(rounds):
        for index in (first, 1 - first):
            job.round(round_, index)
            job.announce(index)
            if round_ == 3:
                tables = job.shards[1].shard.tables
                assert tables is not None
                tables.begin_chain()
    for index in range(2):
        files = base_files(job.shards[index])
        kept = {name: store.contents[name] for name in files}
        for name in files:
            damage(store, name)
        again = process(store, index, consistency="sync:1")
        at, other = again.shard.updates.round, job.shards[1 - index].lifecycle.returnable()
        assert at is not None
        assert at > 0
        assert at in other
        assert at in job.shards[index].lifecycle.returnable()
        assert ledger(again) == due(at, index)
        store.contents.update(kept)
    assert all(len(shard.lifecycle.returnable()) <= 6 for shard in job.shards), (
        "the first, the newest, the cut, two kept"
    )
