"""Shard: a push counts once, only in the incarnation that it names, and its staleness and lag are recorded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import MalformedFrame, StaleIncarnation, StalePlan, StaleRound, WrongRun
from parashard.plan.intervals import IntervalSet
from parashard.plan.optimizers import SGD, Adam, Momentum
from parashard.plan.variables import Variable
from parashard.protocol.messages import Ack, Buffers, PullRun, PushResult
from parashard_server.core.shard import STALENESS_MAX, Shard
from parashard_server.core.update_policies import BatchUpdates
from support.in_process import (
    STEPS,
    WEIGHT_AND_BIAS,
    plan_of,
    pull,
    push,
    push_for,
    shard_of,
    state_of,
    variables_of,
)

PLAN = plan_of(WEIGHT_AND_BIAS)
ELEMENTS = 14


def zeros_shard(**more: object) -> Shard:
    return shard_of(plan_of(variables_of(Variable("w", (4,)))), **more)  # type: ignore[arg-type]


def test_a_push_is_applied_and_reported() -> None:
    shard = zeros_shard()
    assert push(shard, 3, [1.0, 2.0, 3.0, 4.0]) == Ack(PushResult.APPLIED, 1, None)
    assert pull(shard)[1].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert (shard.record.applied_pushes, shard.record.push_bytes, shard.record.pull_bytes) == (1, 16, 16)


def test_twice_is_once() -> None:  # P1
    shard = shard_of(PLAN, spec=Adam())
    push(shard, 3, 1.0)
    before = state_of(shard)
    assert push(shard, 3, 1.0) == Ack(PushResult.DUPLICATE, 1, None)
    assert push(shard, 3, -5.0, pulled_version=0) == Ack(PushResult.DUPLICATE, 1, None)  # another gradient, too
    assert state_of(shard) == before
    assert (shard.record.applied_pushes, shard.record.duplicate_pushes) == (1, 2)


def test_a_repeat_is_a_duplicate_whatever_it_holds() -> None:  # P1: the applied set is looked at first
    shard = zeros_shard()
    push(shard, 3, 1.0)
    late = push_for(shard, 3, np.full(4, np.nan), slices=())
    assert shard.push(late).result is PushResult.DUPLICATE


@given(data=st.data(), steps=st.lists(st.integers(0, STEPS - 1), max_size=30))
def test_any_order_with_any_repeats_gives_the_exact_sum(data: st.DataObject, steps: list[int]) -> None:  # P1
    shard = zeros_shard()
    for step in steps:
        content = np.full(4, 2.0 ** (step % 20), "<f4").tobytes()
        cut = data.draw(st.sampled_from([0, 4, 9]))  # where it lies in two pieces, they are put together
        pieces = Buffers([content[:cut], content[cut:]])
        result = push(shard, step, 0.0, payload=pieces).result
        assert result in (PushResult.APPLIED, PushResult.DUPLICATE)
    assert shard.updates.applied == IntervalSet((step, step + 1) for step in set(steps))
    assert pull(shard)[1].tolist() == [float(sum(2 ** (step % 20) for step in set(steps)))] * 4
    assert shard.record.duplicate_pushes == len(steps) - len(set(steps))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"run_id": "run-2"}, WrongRun),  # P2
        ({"run_id": ""}, WrongRun),
        ({"job_digest": "e" * 64}, WrongRun),
        ({"shard": 1}, WrongRun),
        ({"plan_version": 6}, StalePlan),
        ({"incarnation": 0}, StaleIncarnation),  # P3: an earlier incarnation, or a later one
        ({"incarnation": 2}, StaleIncarnation),
    ],
)
def test_a_request_for_another_incarnation_is_refused(changed: dict[str, object], error: type[Exception]) -> None:
    shard = shard_of(PLAN)
    push(shard, 0, 1.0)
    before, target = state_of(shard), shard.identity._replace(**changed)
    for step in (0, 1):  # a duplicate as well: its ack would count for the wrong incarnation
        with pytest.raises(error):
            shard.push(push_for(shard, step, np.ones(ELEMENTS), target=target))
    with pytest.raises(error):
        shard.pull(PullRun(target, None, 1, 0, 4))
    assert state_of(shard) == before
    assert (shard.record.refused_pushes, shard.record.duplicate_pushes, shard.record.push_bytes) == (2, 0, 56)


def test_the_right_error_comes_first() -> (
    None
):  # who is of another run stops; to look at plan and incarnation would mislead it
    shard = shard_of(PLAN)
    target = shard.identity._replace(run_id="run-2", plan_version=9, incarnation=9)
    with pytest.raises(WrongRun, match=r"shard 0 of run run-2 .* this is shard 0 of run run-1"):
        shard.pull(PullRun(target, None, None, 0, 4))


# --- staleness and lag ---


def test_staleness_is_what_was_applied_between_pull_and_push() -> None:
    shard = zeros_shard()
    version, _ = pull(shard)
    for step, staleness in ((0, 0), (1, 1), (2, 2)):
        assert push(shard, step, 1.0, pulled_version=version).staleness == staleness
    push(shard, 3, 1.0, pulled_version=2)
    assert shard.record.staleness == {0: 1, 1: 2, 2: 1}


def test_the_staleness_of_a_part_is_that_of_its_gradient_when_the_batch_moves_the_weights() -> None:
    shard = in_batches(2)
    push(shard, 2, 1.0, pulled_version=0)
    push(shard, 0, 1.0)
    assert (shard.record.staleness, shard.record.unknown_staleness) == ({}, 0)
    push(shard, 1, 1.0, pulled_version=0)
    push(shard, 3, 1.0, pulled_version=1)
    assert shard.record.staleness == {0: 2, 1: 1}, "one update came between the pull of step 2 and its own"
    assert shard.record.unknown_staleness == 1


def test_unknown_staleness_is_counted_as_unknown() -> None:  # P16
    shard = zeros_shard()
    push(shard, 0, 1.0)
    push(shard, 1, 1.0)
    assert (shard.record.unknown_staleness, shard.record.staleness) == (2, {})


def test_great_staleness_is_counted_at_the_bound() -> None:
    shard = zeros_shard()
    shard.updates.applied.add_range(0, STALENESS_MAX + 9)
    shard.steps_total = STALENESS_MAX + 20
    push(shard, STALENESS_MAX + 9, 1.0, pulled_version=0)
    assert shard.record.staleness == {STALENESS_MAX: 1}


def test_step_lag_is_measured_against_the_lowest_step_missing_here() -> None:
    shard, lags = zeros_shard(), []
    for step in (0, 3, 1, 2, 5):
        push(shard, step, 1.0)
        lags.append(shard.record.step_lag_max)
    assert lags == [0, 2, 2, 2, 2]


def test_a_duplicate_has_neither_staleness_nor_lag() -> None:
    shard = zeros_shard()
    for step in (0, 1):
        push(shard, step, 1.0, pulled_version=0)
    push(shard, 0, 1.0, pulled_version=0)
    assert shard.record.staleness == {0: 1, 1: 1}


# --- placement, empty pushes ---


@pytest.mark.parametrize("spec", [Momentum(learning_rate=0.5), Adam(learning_rate=0.5), SGD(learning_rate=0.5)])
def test_an_empty_push_is_a_gradient_of_zeros(spec: SGD) -> None:  # P15
    empty, explicit = (shard_of(PLAN, spec=spec.replaced(weight_decay=0.1)) for _ in range(2))
    for shard in (empty, explicit):
        push(shard, 0, 1.0)
    before = state_of(empty)
    ack = empty.push(push_for(empty, 1, [], slices=()))
    push(explicit, 1, 0.0)
    assert ack == Ack(PushResult.APPLIED, 2, None)
    assert state_of(empty) == state_of(explicit)
    assert state_of(empty)[0] != before[0]  # moments and weight decay move


def test_a_skipped_step_is_counted() -> None:  # P6
    shard = zeros_shard()
    shard.push(push_for(shard, 0, [], slices=(), skipped=True))
    assert (shard.record.skipped_steps, shard.updates.applied) == (1, IntervalSet([(0, 1)]))


def in_batches(parts: int) -> Shard:
    shard = zeros_shard()
    shard.updates = BatchUpdates(shard.storage, parts=parts)
    return shard


def test_a_part_that_is_given_up_keeps_the_gradient_that_is_held_and_else_counts_as_come() -> None:  # P24, P39
    shard = in_batches(2)
    push(shard, 0, 1.0)
    assert shard.push(push_for(shard, 0, [], slices=(), skipped=True)).result is PushResult.DUPLICATE
    assert shard.push(push_for(shard, 1, [], slices=(), skipped=True)).result is PushResult.APPLIED
    assert shard.updates.skipped == IntervalSet([(1, 2)])
    assert pull(shard)[1].tolist() == [1.0] * 4


# --- pulls ---


@pytest.mark.parametrize(
    ("offset", "length", "round_"),
    [(0, 20, None), (16, 4, None), (2, 2, None), (0, 6, None), (0, 4, 0)],
)
def test_pulls_that_are_refused(offset: int, length: int, round_: int | None) -> None:
    shard = zeros_shard()
    with pytest.raises(MalformedFrame):
        shard.pull(PullRun(shard.identity, round_, None, offset, length))
    assert shard.record.pull_bytes == 0


def test_a_pull_that_knows_a_version_that_never_was_is_refused() -> None:
    shard = zeros_shard()
    push(shard, 0, 1.0)
    assert shard.pull(PullRun(shard.identity, None, None, 0, 16, known_version=1)).runs == ()
    with pytest.raises(MalformedFrame, match="a pull knows version 2; this shard is at 1"):
        shard.pull(PullRun(shard.identity, None, None, 0, 16, known_version=2))


def test_a_run_of_the_vector_is_pulled() -> None:
    shard = zeros_shard()
    push(shard, 0, [1.0, 2.0, 3.0, 4.0])
    weights = shard.pull(PullRun(shard.identity, None, None, 4, 8))
    (run,) = weights.runs
    assert (weights.version, run.offset_bytes, np.frombuffer(run.values, "<f4").tolist()) == (1, 4, [2.0, 3.0])
    assert shard.pull(PullRun(shard.identity, None, None, 16, 0)).runs == ()


def test_a_pull_commits_the_round_before_and_names_its_own() -> None:  # P10, P11
    shard = zeros_shard(round_steps=2)
    for step in (1, 0):
        assert push(shard, step, 2.0, pulled_version=0).result is PushResult.BUFFERED
    assert pull(shard, round_=0) == (0, pytest.approx(np.zeros(4)))
    version, weights = pull(shard, round_=1)
    assert (version, weights.tolist()) == (1, [2.0] * 4)
    with pytest.raises(StaleRound):
        pull(shard, round_=0)
    assert push(shard, 0, 7.0).result is PushResult.DUPLICATE  # a late twin of a step that is in
    assert shard.record.buffered_pushes == 2


def test_a_step_that_is_skipped_counts_as_its_empty_push() -> None:
    shard = zeros_shard(round_steps=2)
    shard.skip(0)
    assert push(shard, 0, 7.0).result is PushResult.DUPLICATE
    assert shard.record.buffered_pushes == 1


# --- pushes that move nothing ---


def test_a_void_push_is_in_once_and_moves_nothing() -> None:  # P1, P15
    shard = shard_of(PLAN, spec=Adam(weight_decay=0.1))
    push(shard, 3, 1.0)
    before = state_of(shard)[:2]
    assert shard.push(push_for(shard, 4, [], slices=(), void=True)).result is PushResult.APPLIED
    assert state_of(shard)[:2] == before
    assert shard.updates.applied == IntervalSet([(3, 5)])
    assert push(shard, 4, 1.0).result is PushResult.DUPLICATE
    shard.push(push_for(shard, 5, [], slices=()))
    assert state_of(shard)[:2] != before, "an empty push is a zero gradient, and moves moments"


def test_a_void_push_has_no_slices_and_no_place_in_a_round() -> None:
    whole, rounds = zeros_shard(), zeros_shard(round_steps=2)
    for shard, refused in (
        (whole, push_for(whole, 0, np.ones(4), void=True)),
        (whole, push_for(whole, 0, [], slices=(), void=True, skipped=True)),
        (rounds, push_for(rounds, 0, [], slices=(), void=True)),
    ):
        with pytest.raises(MalformedFrame, match="a push that moves nothing"):
            shard.push(refused)
        assert not shard.updates.holds(0)
