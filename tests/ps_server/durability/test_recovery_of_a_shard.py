"""What a new incarnation begins from: the shard's newest good checkpoint, the plan's drained one, or first values."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.state import ShardState
from parashard.errors import DamagedCheckpoint, StoreFailed, WrongRun
from parashard.plan.partition import fixed_shards, place, split
from parashard_server.durability.recovery import Restorer
from support.checkpoint_cases import (
    DIGEST,
    PLAN,
    RUN,
    SLOTS,
    STEPS,
    VARIABLES,
    model_of,
    slots_of,
    state_of,
    write_drained,
    write_state,
)
from support.store_fakes import MemoryStore

PLAN_ON_3 = place(VARIABLES, split(VARIABLES, fixed_shards(3)), 3, version=2)


def restorer(store: MemoryStore, index: int = 0, *, source: str = "", rounds: bool = False, run: str = RUN) -> Restorer:
    reply = pb.GetJobReply(run_id=run, job_digest=DIGEST, source=source)
    plan = PLAN_ON_3 if source else PLAN
    return Restorer(Catalogue(store), reply, plan, index, SLOTS, rounds=rounds)


def written(
    store: MemoryStore, incarnation: int, number: int, steps: int, *, round_: int | None = None, seed: int = 0
) -> CheckpointId:
    id_ = CheckpointId(PLAN.version, 0, incarnation, number)
    write_state(store, PLAN, id_, state_of(PLAN, 0, seed, [(0, steps)]), round=round_)
    return id_


def steps_of(state: ShardState | None) -> list[tuple[int, int]]:
    assert state is not None
    return list(state.applied.intervals())


def damage(store: MemoryStore, id_: CheckpointId, part: str) -> None:
    """Flip a bit in a file of a checkpoint."""
    name = next(name for name in store.contents if name.startswith(id_.folder) and part in name)
    content = bytearray(store.contents[name])
    content[len(content) // 2] ^= 1
    store.contents[name] = bytes(content)


def test_without_checkpoints_an_incarnation_begins_at_the_first_values(store: MemoryStore) -> None:
    restored = restorer(store).newest()
    assert (restored.state, restored.known, restored.text) == (None, [], "initial values")


def test_the_newest_incarnation_s_newest_checkpoint_is_restored(store: MemoryStore) -> None:
    for incarnation, number, steps in ((1, 9, 8), (2, 1, 5), (2, 2, 6)):
        written(store, incarnation, number, steps)
    restored = restorer(store).newest()
    assert steps_of(restored.state) == [(0, 6)]
    assert restored.text == "restored p1/s0/i2/c2 with 6 steps"
    assert [str(held.id) for held in restored.known] == ["p1/s0/i1/c9", "p1/s0/i2/c1", "p1/s0/i2/c2"]


def test_in_rounds_the_highest_round_counts(store: MemoryStore) -> None:  # P12
    written(store, 1, 9, 8, round_=2)
    written(store, 2, 1, 4, round_=1)
    restored = restorer(store, rounds=True).newest()
    assert restored.text == "restored p1/s0/i1/c9 with 8 steps"
    assert [held.round for held in restored.known] == [2, 1]


@pytest.mark.parametrize("part", ["manifest", "variables-", "slots-"])
def test_a_damaged_one_is_skipped_and_named_and_no_longer_counts(store: MemoryStore, part: str) -> None:
    good, bad = written(store, 1, 1, 5), written(store, 1, 2, 6)
    damage(store, bad, part)
    restored = restorer(store).newest()
    assert steps_of(restored.state) == [(0, 5)]
    assert restored.text.startswith("restored p1/s0/i1/c1 with 5 steps; skipped p1/s0/i1/c2: ")
    assert [held.id for held in restored.known] == [good]


def test_where_all_are_damaged_it_begins_at_the_first_values_and_says_so(store: MemoryStore) -> None:
    for id_ in (written(store, 1, 1, 5), written(store, 1, 2, 6)):
        damage(store, id_, "slots-")
    restored = restorer(store).newest()
    assert (restored.state, restored.known) == (None, [])
    assert restored.text.startswith("initial values; skipped p1/s0/i1/c2: ")


def test_a_store_that_fails_is_no_reason_to_begin_anew(store: MemoryStore) -> None:  # P20
    written(store, 1, 1, 5)
    for operation, within in (("folders", "shards"), ("read", "variables-"), ("read", "manifest")):
        fault = store.fail(operation, within)
        with pytest.raises(StoreFailed, match="no space left"):
            restorer(store).newest()
        assert fault.fired == 1


def test_a_checkpoint_of_another_run_is_refused(store: MemoryStore) -> None:  # P2
    written(store, 1, 1, 5)
    with pytest.raises(WrongRun, match=f"checkpoint p1/s0/i1/c1 is of run {RUN} .* this is run run-2"):
        restorer(store, run="run-2").newest()


# --- a plan that began at a drained checkpoint ---


def rows(values: dict[str, np.ndarray], shard: int) -> dict[object, bytes]:
    return {p: values[p.variable][p.row_start : p.row_stop].tobytes() for p in PLAN_ON_3.shards[shard]}


def test_a_new_plan_s_shards_are_cut_out_of_the_drained_checkpoint(store: MemoryStore) -> None:  # P8
    write_drained(store, seed=4)
    for shard in range(3):
        restored = restorer(store, shard, source="j1").newest()
        assert restored.text == f"resharded j1 with {STEPS} steps"
        assert restored.state is not None
        assert {p: a.tobytes() for p, a in restored.state.variables.items()} == rows(model_of(4), shard)
        for slot, values in slots_of(4).items():
            assert {p: a.tobytes() for p, a in restored.state.slots[slot].items()} == rows(values, shard)


def test_a_checkpoint_of_the_new_plan_goes_before_it(store: MemoryStore) -> None:
    write_drained(store)
    id_ = CheckpointId(PLAN_ON_3.version, 0, 1, 1)
    write_state(store, PLAN_ON_3, id_, state_of(PLAN_ON_3, 0, 1, [(0, 30)]))
    assert restorer(store, source="j1").newest().text == "restored p2/s0/i1/c1 with 30 steps"


@pytest.mark.parametrize("part", ["manifest", "variables-"])
def test_a_damaged_drained_checkpoint_is_an_error_and_no_fresh_start(store: MemoryStore, part: str) -> None:
    write_drained(store)
    damage(store, CheckpointId(PLAN.version, 0, 1, 1), part)
    with pytest.raises(DamagedCheckpoint):
        restorer(store, source="j1").newest()


# --- a round to return to ---


def returned(store: MemoryStore, round_: int, ids: Iterable[CheckpointId]) -> ShardState | None:
    return restorer(store, rounds=True).at(round_, list(ids))


def test_a_round_is_read_from_the_first_of_its_checkpoints_that_verifies(store: MemoryStore) -> None:  # P12
    older, newer = written(store, 1, 1, 8, round_=2, seed=1), written(store, 2, 1, 8, round_=2, seed=1)
    assert steps_of(returned(store, 2, [newer, older])) == [(0, 8)]
    damage(store, newer, "variables-")
    assert steps_of(returned(store, 2, [newer, older])) == [(0, 8)]
    store.delete(newer.manifest_name)
    assert steps_of(returned(store, 2, [newer, older])) == [(0, 8)]


def test_the_round_where_the_plan_began_can_always_be_returned_to(store: MemoryStore) -> None:  # P12
    assert returned(store, 0, []) is None
    write_drained(store)
    of_plan = restorer(store, source="j1", rounds=True)
    of_plan.first_round = 3
    assert steps_of(of_plan.at(3, [])) == [(0, STEPS)]


def test_a_round_of_which_nothing_verifies_is_an_error_that_names_what_was_tried(store: MemoryStore) -> None:
    bad = written(store, 1, 1, 8, round_=2)
    damage(store, bad, "slots-")
    with pytest.raises(DamagedCheckpoint, match="no checkpoint of round 2 verifies; tried p1/s0/i1/c1"):
        returned(store, 2, [bad])
    with pytest.raises(DamagedCheckpoint, match="tried none"):
        returned(store, 2, [])


def test_only_jobs_with_rounds_have_a_first_round(store: MemoryStore) -> None:
    assert restorer(store, rounds=True).first_round == 0
    assert restorer(store, rounds=False).first_round is None
