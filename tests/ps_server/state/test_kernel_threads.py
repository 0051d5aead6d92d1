"""Kernels on several threads have the bits of the reference, on views such as pushes and partitions bring them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from parashard.process import lanes, resources
from parashard_server.build import ShardBuilder
from parashard_server.state.kernels import fused
from parashard_server.state.kernels.scalars import BLOCK_ELEMENTS, trust_ratio
from support import reference_rules as reference
from support.kernel_cases import COMMON, COUNTING, KERNELS, assert_same_bits, drawn, update
from support.shard_process import job_reply

UseThreads = Callable[[int], None]
SIZES = (3 * BLOCK_ELEMENTS, 5 * BLOCK_ELEMENTS + 7)
OFFSETS = (0, 1, 3)
"""In elements: where views of a shard's flat vector begin is up to the partitions before them."""


@pytest.fixture
def use_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[UseThreads]:
    """Let vectors of a few blocks be shared, and set the number of threads for the test."""
    monkeypatch.setattr(lanes, "SHARED_MIN_BYTES", 8 * BLOCK_ELEMENTS)
    monkeypatch.setattr(lanes, "RUN_MIN_BYTES", 4 * BLOCK_ELEMENTS)
    before = fused._lanes.threads
    yield fused.use_threads
    fused.use_threads(before)


def view(seed: int, size: int, offset: int) -> np.ndarray:
    return drawn(seed, size + offset)[offset:]


def updated(kernels: Any, kind: str, size: int, offset: int) -> list[np.ndarray]:
    """Return [weights, *slots] after two steps with gradients that may only be read."""
    slots, own = KERNELS[kind]
    arrays = [view(0, size, offset), *(np.zeros(size + offset, np.float32)[offset:] for _ in range(slots))]
    for t in (1, 2):
        gradient = view(t, size, offset)
        gradient.flags.writeable = False
        update(kernels, kind, arrays[0], gradient, *arrays[1:], **COMMON | own | ({"t": t} if kind in COUNTING else {}))
    return arrays


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KERNELS)
def test_any_number_of_threads_gives_the_bits_of_the_reference(
    kind: str, size: int, offset: int, use_threads: UseThreads
) -> None:  # P13
    expected = updated(reference, kind, size, offset)
    for threads in (1, 2, 3):
        use_threads(threads)
        assert_same_bits(updated(fused, kind, size, offset), expected)


@pytest.mark.parametrize("offset", OFFSETS)
def test_folds_have_the_same_bits_on_any_number_of_threads(offset: int, use_threads: UseThreads) -> None:
    size = SIZES[1]
    results = []
    for kernels, threads in ((reference, 1), (fused, 1), (fused, 2), (fused, 3)):
        use_threads(threads)
        total = view(1, size, offset)
        kernels.accumulate(total, view(2, size, offset))
        results.append([total])
    for found in results[1:]:
        assert_same_bits(found, results[0])


@pytest.mark.parametrize("threads", [2, 3])
def test_what_is_not_finite_is_seen_in_every_run(threads: int, use_threads: UseThreads) -> None:  # P14
    use_threads(threads)
    array = drawn(0, SIZES[1])
    assert fused.is_finite(array)
    for place in [*range(0, array.size, BLOCK_ELEMENTS), array.size - 1]:
        damaged = array.copy()
        damaged[place] = np.nan
        assert not fused.is_finite(damaged), place


def test_every_rule_is_shared_by_the_threads(use_threads: UseThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(2)
    cut, cuts = lanes.cut, []
    monkeypatch.setattr(lanes, "cut", lambda *given: cuts.append(cut(*given)) or cuts[-1])
    for kind in KERNELS:
        updated(fused, kind, SIZES[1], 0)
        assert all(len(runs) > 1 for runs in cuts), kind
        assert len(cuts) == (4 if kind == "lamb" else 2), kind  # LAMB needs its norms before it moves a weight
        cuts.clear()


def test_lamb_adds_its_blocks_in_their_order(use_threads: UseThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    for kernels in (fused, reference):
        monkeypatch.setattr(kernels, "trust_ratio", lambda squares: sums.append(squares) or trust_ratio(squares))
    use_threads(3)
    for kernels in (fused, reference):
        updated(kernels, "lamb", SIZES[1], 0)
    assert sums[0].shape == (6, 2)
    np.testing.assert_array_equal(sums[:2], sums[2:])


def test_the_order_of_blocks_is_the_order_of_the_sum() -> None:
    huge, ones = 2.0**53, np.ones(8)
    first, last = np.array([huge, *ones]), np.array([*ones, huge])  # 2^53 + 1 is 2^53
    assert trust_ratio(np.stack([first, first], axis=1)) == 1.0
    assert trust_ratio(np.stack([first, last], axis=1)) == huge**0.5 / (huge + 8.0) ** 0.5 < 1.0


def test_without_a_norm_the_ratio_is_one() -> None:
    assert trust_ratio(np.zeros((0, 2))) == 1.0
    assert trust_ratio(np.array([[4.0, 0.0]])) == trust_ratio(np.array([[0.0, 4.0]])) == 1.0


@pytest.mark.parametrize(("asked", "used"), [(0, 4), (3, 3)])
def test_a_shard_uses_its_share_of_the_cores_or_what_the_job_says(
    asked: int, used: int, use_threads: UseThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "cores", lambda: 8)  # of two shards
    reply = job_reply()
    reply.job_toml = reply.job_toml.replace("shard_threads = 0", f"shard_threads = {asked}")
    ShardBuilder(reply, 0)
    assert fused._lanes.threads == used
