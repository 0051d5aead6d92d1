"""Error feedback: nothing of a gradient is lost, however pushes overlap and whatever becomes of them (P17)."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.encodings.codec import decode
from parashard.encodings.feedback import Encoded, GradientEncoder
from parashard.plan.partition import Placed, Plan, fixed_shards, place, split
from parashard.plan.variables import Float32s, Variable
from parashard.protocol.messages import DType

ROWS = 40
WITH_RESIDUE = ("int8", "topk:0.05")


def plan_of(encoding: str, rows: int = ROWS) -> Plan:
    variables = {"w": Variable("w", (rows, 10), encoding=encoding)}
    return place(variables, split(variables, fixed_shards(1)), 1)


class Shard:
    """Applies what it is sent to a sum, in float64."""

    def __init__(self, encoding: str) -> None:
        plan = plan_of(encoding)
        self.placed: Placed = plan.layouts[0][0]
        self.encoder = GradientEncoder(plan)
        self.applied = np.zeros(self.placed.elements)

    def encode(self, gradient: Float32s) -> Encoded:
        return self.encoder.encode(0, self.placed, gradient)

    def decoded(self, encoded: Encoded) -> Float32s:
        into = np.empty(self.placed.elements, np.float32)
        decode(encoded.slice, encoded.payload, into)
        return into

    def finish(self, encoded: Encoded, applied: bool) -> None:
        if applied:
            self.applied += self.decoded(encoded)
        self.encoder.settle([encoded], applied)

    def residue(self) -> Float32s:
        """Return what is left to be sent, by looking at what would go with a gradient of zero."""
        residue = np.zeros(self.placed.elements, np.float32)
        encoded = self.encode(np.zeros((ROWS, 10), np.float32))
        if encoded._residue is not None:
            residue[:] = encoded._residue
        self.encoder.settle([encoded], applied=False)
        return residue


def gradient(seed: int) -> Float32s:
    return np.random.default_rng(seed).standard_normal((ROWS, 10)).astype(np.float32)


def assert_nothing_lost(shard: Shard, gradients: list[Float32s]) -> None:
    total = np.sum(np.asarray(gradients, np.float64), axis=0).reshape(-1) if gradients else 0.0
    np.testing.assert_allclose(shard.applied + shard.residue(), total, atol=1e-4)


@pytest.mark.parametrize("encoding", WITH_RESIDUE)
def test_what_was_applied_and_what_is_left_is_all_that_was_pushed(encoding):
    shard = Shard(encoding)
    gradients = [gradient(seed) for seed in range(50)]
    for each in gradients:
        shard.finish(shard.encode(each), applied=True)
    assert_nothing_lost(shard, gradients)
    assert shard.residue().any()


@pytest.mark.parametrize("encoding", WITH_RESIDUE)
def test_a_push_that_was_not_applied_leaves_the_residue_as_it_was(encoding):  # P17
    shard = Shard(encoding)
    shard.finish(shard.encode(gradient(0)), applied=True)
    before = shard.residue()
    shard.finish(shard.encode(gradient(1)), applied=False)
    assert before.any()
    np.testing.assert_array_equal(shard.residue(), before)


def test_a_push_under_way_has_the_residue_and_the_next_one_has_none():
    shard = Shard("topk:0.05")
    shard.finish(shard.encode(gradient(0)), applied=True)
    before = shard.residue()
    first, second = shard.encode(gradient(1)), shard.encode(gradient(2))
    alone = Shard("topk:0.05")
    np.testing.assert_array_equal(shard.decoded(second), alone.decoded(alone.encode(gradient(2))))
    shard.finish(first, applied=False)
    shard.finish(second, applied=False)
    np.testing.assert_array_equal(shard.residue(), before)


@pytest.mark.parametrize("encoding", WITH_RESIDUE)
@given(data=st.data())
def test_pushes_that_overlap_in_any_order_lose_nothing(encoding, data):  # P17
    shard = Shard(encoding)
    under_way: list[tuple[Encoded, Float32s]] = []
    done: list[Float32s] = []
    for seed in range(data.draw(st.integers(1, 12))):
        each = gradient(seed)
        under_way.append((shard.encode(each), each))
        while under_way and data.draw(st.booleans()):
            encoded, pushed = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            applied = data.draw(st.booleans())
            shard.finish(encoded, applied)
            done += [pushed] if applied else []
    for encoded, pushed in under_way:
        shard.finish(encoded, applied=True)
        done.append(pushed)
    assert_nothing_lost(shard, done)


def test_threads_that_push_at_once_lose_nothing():
    shard = Shard("int8")
    gradients = [[gradient(10 * thread + i) for i in range(10)] for thread in range(4)]
    applying = threading.Lock()

    def push(mine: list[Float32s]) -> None:
        for each in mine:
            encoded = shard.encode(each)
            with applying:
                shard.applied += shard.decoded(encoded)
            shard.encoder.settle([encoded], applied=True)

    threads = [threading.Thread(target=push, args=(mine,)) for mine in gradients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert_nothing_lost(shard, [each for mine in gradients for each in mine])


def test_what_is_settled_stays_as_it_is():
    shard = Shard("topk:0.05")
    encoded = shard.encode(gradient(0))
    shard.finish(encoded, applied=True)
    before = shard.residue()
    shard.encoder.settle([encoded], applied=False)
    shard.encoder.settle([encoded], applied=True)
    np.testing.assert_array_equal(shard.residue(), before)


def test_a_push_under_way_keeps_its_bytes_while_others_come_and_go():
    shard = Shard("int8")
    shard.finish(shard.encode(gradient(0)), applied=True)
    waiting = shard.encode(gradient(1))
    before = bytes(waiting.payload)
    for seed in range(2, 6):
        shard.finish(shard.encode(gradient(seed)), applied=True)
    assert bytes(waiting.payload) == before


def test_memory_of_an_applied_push_is_used_again_and_that_of_another_is_not():
    shard = Shard("bfloat16")
    first = shard.encode(gradient(0))
    shard.encoder.settle([first], applied=True)
    second = shard.encode(gradient(1))
    assert np.shares_memory(np.asarray(first.payload), np.asarray(second.payload))
    shard.encoder.settle([second], applied=False)  # it may still be in flight
    assert not np.shares_memory(np.asarray(second.payload), np.asarray(shard.encode(gradient(2)).payload))


def test_the_gradient_is_only_read_and_may_lie_in_any_order_of_memory():
    shard = Shard("int8")
    rows = np.asfortranarray(gradient(0))
    rows.flags.writeable = False
    other = Shard("int8")
    assert bytes(shard.encode(rows).payload) == bytes(other.encode(gradient(0)).payload)


def test_a_partition_too_short_to_encode_goes_as_it_is():
    plan = plan_of("topk:0.3", rows=1)
    encoder = GradientEncoder(Plan(1, {"w": Variable("w", (1,), encoding="topk:0.3")}, plan.shards))
    encoded = encoder.encode(0, Placed(plan.shards[0][0], 0, 1), np.array([3.5], np.float32))
    assert encoded.slice.dtype is DType.FLOAT32
    assert np.frombuffer(encoded.payload, np.float32).tolist() == [3.5]
    encoder.settle([encoded], applied=True)
    again = encoder.encode(0, Placed(plan.shards[0][0], 0, 1), np.array([1.0], np.float32))
    assert again._residue is None
