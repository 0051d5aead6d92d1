"""StepPlan: every example exactly once per epoch, sizes, and the errors of wrong numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ConfigurationError
from parashard.plan.steps import PART_EXAMPLES_MIN, StepPlan, parts_of_batch


@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 3), st.integers(-(2**63), 2**64))
def test_each_epoch_has_every_example_exactly_once(examples, batch_size, epochs, seed):
    plan = StepPlan(examples, batch_size, epochs, seed)
    seen = np.zeros((epochs, examples), int)
    for step in range(plan.total):
        seen[plan.epoch_of(step), plan.indices(step)] += 1
    assert (seen == 1).all()


@given(st.integers(1, 2**40), st.integers(1, 5000), st.integers(1, 100), st.data())
def test_sizes(examples, batch_size, epochs, data):
    plan = StepPlan(examples, batch_size, epochs, 1)
    step = data.draw(st.integers(0, plan.total - 1))
    last = step % plan.steps_per_epoch == plan.steps_per_epoch - 1
    assert plan.total == epochs * -(-examples // batch_size)
    assert len(plan.indices(step)) == (examples - 1) % batch_size + 1 if last else batch_size


def test_a_step_is_the_same_whenever_it_is_computed():
    plan = StepPlan(1000, 32, 5, seed=3)
    forwards = [plan.indices(step).tolist() for step in range(plan.total)]
    backwards = [StepPlan(1000, 32, 5, seed=3).indices(step).tolist() for step in reversed(range(plan.total))]
    assert forwards == backwards[::-1]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = set()
    for seed in (0, 1):
        plan = StepPlan(100, 10, 2, seed)
        for epoch in (0, 1):
            orders.add(tuple(np.concatenate([plan.indices(epoch * 10 + i) for i in range(10)]).tolist()))
    assert len(orders) == 4


@pytest.mark.parametrize("step", [-1, 9, 10**12])
def test_a_step_that_the_job_does_not_have_is_an_error(step):
    plan = StepPlan(5, 2, 3, 0)
    for call in (plan.indices, plan.epoch_of):
        with pytest.raises(ValueError, match=rf"\[0, 9\), found step {step}"):
            call(step)


@pytest.mark.parametrize("examples", [0, 2**40 + 1])
def test_a_wrong_number_of_examples_is_named(examples):
    with pytest.raises(ConfigurationError, match="examples"):
        StepPlan(examples, 1, 1, 0)


def test_a_message_about_a_step_names_its_first_examples():
    plan = StepPlan(20, 9, 1, seed=3)
    first, last = plan.indices(0).tolist(), plan.indices(2).tolist()
    assert plan.examples_in_words(0) == f" (examples {', '.join(map(str, first[:8]))}, ...)"
    assert plan.examples_in_words(2) == f" (examples {last[0]}, {last[1]})"
    assert StepPlan(8, 8, 1, 0).examples_in_words(0).count(",") == 7, "eight are shown, and nothing is left out"


def test_epochs_before_the_first_were_another_job_s():
    whole, rest = StepPlan(7, 3, 5, 2), StepPlan(7, 3, 2, 2, first_epoch=3)
    assert rest.total == 6
    for step in range(rest.total):
        assert rest.epoch_of(step) == whole.epoch_of(9 + step)
        assert rest.indices(step).tolist() == whole.indices(9 + step).tolist()


# --- what an epoch is ---


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4), st.integers(1, 30), st.booleans(), st.booleans())
def test_passes_go_on_from_one_epoch_into_the_next(examples, batch_size, epochs, epoch_steps, drop_last, shuffle):
    if drop_last and batch_size > examples:
        return
    plan = StepPlan(examples, batch_size, epochs, 5, 0, epoch_steps, drop_last, shuffle)
    passes = StepPlan(examples, batch_size, plan.total, 5, drop_last=drop_last, shuffle=shuffle)
    assert plan.total == epochs * epoch_steps
    for step in range(plan.total):
        assert plan.epoch_of(step) == step // epoch_steps
        assert plan.indices(step).tolist() == passes.indices(step).tolist()
        assert plan.size(step) == len(plan.indices(step))
    sizes = {plan.size(step) for step in range(plan.total)}
    assert sizes == {plan.size(0)} | ({plan.short} if plan.short else set())
    rest = StepPlan(examples, batch_size, epochs, 5, 2, epoch_steps, drop_last, shuffle)
    whole = StepPlan(examples, batch_size, epochs + 2, 5, 0, epoch_steps, drop_last, shuffle)
    for step in range(rest.total):
        assert rest.indices(step).tolist() == whole.indices(2 * epoch_steps + step).tolist()
        assert rest.epoch_of(step) == whole.epoch_of(2 * epoch_steps + step)


@given(st.integers(1, 300), st.integers(1, 100))
def test_a_pass_leaves_out_less_than_a_step(examples, batch_size):
    if batch_size > examples:
        with pytest.raises(ConfigurationError, match=f"a batch has {batch_size} examples, and there are {examples}"):
            StepPlan(examples, batch_size, 1, 0, drop_last=True)
        return
    plan = StepPlan(examples, batch_size, 1, 0, drop_last=True)
    seen = np.concatenate([plan.indices(step) for step in range(plan.total)])
    assert {plan.size(step) for step in range(plan.total)} == {batch_size}
    assert len(set(seen.tolist())) == len(seen) == examples - plan.dropped


def test_each_pass_leaves_others_out():
    plan = StepPlan(10, 4, 9, 0, drop_last=True)
    of_pass = [{*plan.indices(2 * number).tolist(), *plan.indices(2 * number + 1).tolist()} for number in range(9)]
    assert set.union(*of_pass) == set(range(10))


def test_without_shuffling_examples_come_in_their_own_order():
    plan = StepPlan(10, 4, 2, 0, shuffle=False)
    due = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [plan.indices(step).tolist() for step in range(plan.total)] == due * 2


# --- parts of batches ---


@given(st.integers(1, 200), st.integers(1, 70), st.integers(1, 9), st.booleans(), st.booleans())
def test_the_parts_of_a_batch_are_the_batch(examples, batch_size, parts, drop_last, shuffle):
    if drop_last and batch_size > examples:
        return
    whole = StepPlan(examples, batch_size, 2, 7, 1, None, drop_last, shuffle)
    split = StepPlan(examples, batch_size, 2, 7, 1, None, drop_last, shuffle, parts=parts)
    assert (split.total, split.short) == (whole.total * parts, whole.short)
    sizes = set()
    for batch in range(whole.total):
        steps = range(batch * parts, (batch + 1) * parts)
        assert np.concatenate([split.indices(step) for step in steps]).tolist() == whole.indices(batch).tolist()
        assert all(split.indices_of_batch(step).tolist() == whole.indices(batch).tolist() for step in steps)
        assert {split.epoch_of(step) for step in steps} == {whole.epoch_of(batch)}
        assert [split.size(step) for step in steps] == [len(split.indices(step)) for step in steps]
        assert sum(split.share(step) for step in steps) == pytest.approx(1.0)
        sizes |= {split.size(step) for step in steps if split.size(step)}
    assert set(split.sizes) == sizes


@given(st.integers(0, 500), st.integers(1, 30))
def test_a_part_has_a_few_examples_or_none(rows, parts):
    plan = StepPlan(8, 8, 1, 0, parts=parts)
    cut = [plan.rows_of_part(step, rows) for step in range(parts)]
    lengths = [one.stop - one.start for one in cut]
    assert sum(lengths) == rows
    assert max(lengths) - min(filter(None, lengths), default=0) <= max(1, rows if rows < PART_EXAMPLES_MIN else 1)
    assert all(not n or n >= min(rows, PART_EXAMPLES_MIN) for n in lengths)


@pytest.mark.parametrize(
    ("workers", "batch_size", "parts"), [(1, 64, 1), (2, 64, 2), (16, 64, 16), (17, 64, 16), (8, 7, 1), (0, 64, 4)]
)
def test_each_worker_computes_a_part_if_the_batch_is_large_enough(workers, batch_size, parts):
    assert parts_of_batch(workers, batch_size) == parts


def test_of_data_that_are_batches_each_part_names_the_batch():
    plan = StepPlan(5, 1, 1, 3, parts=2, batched=True)
    assert plan.total == 10
    assert [plan.indices(step).tolist() for step in (0, 1)] == [plan.indices_of_batch(0).tolist()] * 2
    assert [plan.rows_of_part(step, 9) for step in (0, 1)] == [slice(0, 4), slice(4, 9)]
