"""Delay compensation: a push is corrected by how far the weights have moved since its own pull, if that is known."""

import numpy as np
import pytest

from parashard.errors import NonFiniteGradient
from parashard.plan.variables import Variable
from parashard_server.core.shard import Shard
from parashard_server.state.pulled_weights import PulledWeights
from support.in_process import COUNTING, plan_of, pull, push, push_for, shard_of, state_of, variables_of

LAMBDA = 0.5


def compensating(**more: object) -> Shard:
    return shard_of(plan_of(variables_of(Variable("w", (4,)))), compensation=LAMBDA, spec=COUNTING, **more)  # type: ignore[arg-type]


def test_the_correction_uses_the_weights_that_the_step_was_pulled_at() -> None:
    shard = compensating()
    pull(shard, step=1)
    push(shard, 0, 3.0)  # its own pull is unknown
    push(shard, 1, 2.0, pulled_version=0)  # g + lambda g g (w - w_pulled) = 2 + 0.5 * 4 * 3
    assert pull(shard)[1].tolist() == [3.0 + 8.0] * 4
    assert shard.record.uncompensated_pushes == 1


def test_a_fresh_push_is_not_changed() -> None:
    shard = compensating()
    pull(shard, step=0)
    push(shard, 0, 2.0, pulled_version=0)
    assert pull(shard)[1].tolist() == [2.0] * 4


def test_without_a_known_version_there_is_no_correction() -> None:  # P16
    shard = compensating()
    pull(shard, step=1)
    push(shard, 0, 3.0)
    push(shard, 1, 2.0, pulled_version=None)
    assert pull(shard)[1].tolist() == [5.0] * 4
    assert shard.record.uncompensated_pushes == 2


def test_the_oldest_copy_is_forgotten_and_its_push_counted() -> None:
    shard = compensating(copies=2)
    for step in (1, 2, 3):
        pull(shard, step=step)
    push(shard, 0, 3.0)
    push(shard, 1, 2.0, pulled_version=0)  # forgotten: as it is
    assert pull(shard)[1].tolist() == [5.0] * 4
    push(shard, 2, 2.0, pulled_version=0)  # kept: 2 + 0.5 * 4 * 5
    assert pull(shard)[1].tolist() == [5.0 + 12.0] * 4
    assert shard.record.uncompensated_pushes == 2


def test_a_pull_for_no_step_keeps_nothing() -> None:
    shard = compensating(copies=1)
    pull(shard, step=1)
    pull(shard)  # an evaluation
    push(shard, 0, 3.0)
    push(shard, 1, 2.0, pulled_version=0)
    assert pull(shard)[1].tolist() == [11.0] * 4


def test_an_overflow_is_refused_every_time() -> None:  # P14: the refusal keeps the copy, so a repeat is refused as well
    shard = compensating()
    pull(shard, step=1)
    push(shard, 0, 3.0)
    before = state_of(shard)
    for _ in range(2):
        with pytest.raises(NonFiniteGradient, match="delay compensation overflows"):
            push(shard, 1, 1e30, pulled_version=0)
        assert state_of(shard) == before


def test_a_step_that_is_in_keeps_no_copy() -> None:
    shard = compensating(copies=1)
    pull(shard, step=0)
    push(shard, 0, 1.0, pulled_version=0)
    pull(shard, step=0)  # a second worker, which computes the step again
    push(shard, 0, 1.0, pulled_version=1)
    assert shard._pulled is not None
    assert shard._pulled.of(0, 1) is None


def test_copies_are_put_together_from_runs_and_are_copies() -> None:
    pulled, values = PulledWeights(4, 2), np.arange(4, dtype=np.float32)
    pulled.keep(7, 5, 2, values[2:])
    assert pulled.of(7, 5) is None  # half of it is not here yet
    pulled.keep(7, 6, 0, values[:2])
    values[:] = -1.0
    copy = pulled.of(7, 5)  # the lowest version of its runs
    assert copy is not None
    assert copy.tolist() == [0.0, 1.0, 2.0, 3.0]
    pulled.forget(7)
    pulled.forget(7)
    assert pulled.of(7, 5) is None


def test_the_push_itself_is_only_read() -> None:
    shard = compensating()
    pull(shard, step=1)
    push(shard, 0, 3.0)
    request = push_for(shard, 1, np.full(4, 2.0), pulled_version=0)
    shard.push(request)
    assert np.frombuffer(request.payload.whole(), "<f4").tolist() == [2.0] * 4
