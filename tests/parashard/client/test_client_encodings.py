"""ShardClient and encoded gradients: what a shard applies adds up to what was computed, whatever a push meets (P17)."""

import numpy as np
import pytest

from parashard.errors import Unreachable
from parashard.plan.partition import fixed_shards
from parashard.plan.variables import Variable
from parashard.protocol.messages import DType, PullRun, Push, PushResult
from support.in_process import Cluster, plan_of, variables_of

ROWS = 400
GRADIENTS = np.random.default_rng(0).normal(size=(12, ROWS)).astype(np.float32)


def cluster_of(encoding: str, shards: int = 2) -> Cluster:
    """Return shards that add up what they are sent."""
    return Cluster(plan_of(variables_of(Variable("w", (ROWS,), encoding=encoding)), shards, fixed_shards(shards)))


def residue_of(client: object) -> np.ndarray:
    residues = client._encoder._residues  # type: ignore[attr-defined]
    return np.concatenate([residues[key] for key in sorted(residues)])


@pytest.mark.parametrize(("encoding", "dtype"), [("bfloat16", DType.BFLOAT16), ("float16", DType.FLOAT16)])
def test_a_shorter_float_moves_the_weights_by_its_own_rounding(encoding, dtype):
    cluster = cluster_of(encoding)
    cluster.client().push(0, {"w": GRADIENTS[0]}, None)
    assert {piece.dtype for push in cluster.pushes for piece in push.slices} == {dtype}
    assert sum(push.payload.nbytes for push in cluster.pushes) == 2 * ROWS
    assert np.allclose(cluster.weights()["w"], GRADIENTS[0], rtol=2**-8)


@pytest.mark.parametrize("encoding", ["int8", "topk:0.1"])
def test_what_was_applied_and_the_residue_add_up_to_the_gradients(encoding):  # P17
    cluster = cluster_of(encoding)
    client = cluster.client()
    for step, gradient in enumerate(GRADIENTS):
        client.push(step, {"w": gradient}, None)
    assert np.allclose(cluster.weights()["w"] + residue_of(client), GRADIENTS.sum(axis=0), atol=1e-4)


@pytest.mark.parametrize("encoding", ["int8", "topk:0.1"])
def test_a_duplicate_leaves_the_residue_as_it_was(encoding):  # P1, P17
    cluster = cluster_of(encoding)
    client = cluster.client()
    client.push(0, {"w": GRADIENTS[0]}, None)
    before = residue_of(client).copy()
    again = client.push(0, {"w": GRADIENTS[1]}, None)
    assert [ack.result for ack in again.acks] == [PushResult.DUPLICATE] * 2
    assert np.array_equal(residue_of(client), before)


@pytest.mark.parametrize("encoding", ["int8", "topk:0.1"])
def test_a_push_that_one_shard_never_got_keeps_that_shards_residue_only(encoding, virtual_time):  # P17
    cluster = cluster_of(encoding)
    client = cluster.client(retry_budget_s=1.0)
    client.push(0, {"w": GRADIENTS[0]}, None)
    before = residue_of(client).copy()

    def dead(address: str, request: Push | PullRun) -> None:
        if address == "shard-1":
            raise Unreachable("dead", peer=address)

    cluster.before = dead
    with pytest.raises(Unreachable):
        client.push(1, {"w": GRADIENTS[1]}, None)
    half = ROWS // 2
    assert not np.array_equal(residue_of(client)[:half], before[:half])
    assert np.array_equal(residue_of(client)[half:], before[half:])
    cluster.before = lambda *_: None
    client.push(1, {"w": GRADIENTS[1]}, None)
    assert np.allclose(cluster.weights()["w"] + residue_of(client), GRADIENTS[:2].sum(axis=0), atol=1e-5)


@pytest.mark.parametrize("encoding", ["int8", "topk:0.1"])
def test_a_push_whose_ack_was_lost_does_not_send_its_residue_twice(encoding, virtual_time):  # P17
    cluster = cluster_of(encoding)
    client, take, lost = cluster.client(), cluster.answer_push, []
    client.push(0, {"w": GRADIENTS[0]}, None)

    def lose_an_answer(address: str, frame: bytes) -> bytes:
        answer = take(address, frame)
        if not lost:
            lost.append(answer)
            raise Unreachable("the answer was lost", peer=address)
        return answer

    cluster.answer_push = lose_an_answer  # type: ignore[method-assign]
    acks = client.push(1, {"w": GRADIENTS[1]}, None).acks
    assert [ack.result for ack in acks] == [PushResult.DUPLICATE, PushResult.APPLIED]
    assert np.allclose(cluster.weights()["w"] + residue_of(client), GRADIENTS[:2].sum(axis=0), atol=1e-5)
