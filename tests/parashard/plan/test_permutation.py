"""Permutation: bijection, dependence on its keys, spread, and bits that never change."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ConfigurationError
from parashard.plan.seeding import MAX_LENGTH, Permutation
from support.tiers import fewer

POWERS = [2**k + d for k in range(1, 15) for d in (-1, 0, 1)]


def image(length: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return Permutation(length, seed, epoch)(np.arange(length))


@pytest.mark.parametrize("length", sorted({*range(1, 40), *POWERS, 1437, 60_000}))
def test_is_a_bijection(length):
    assert np.array_equal(np.sort(image(length, seed=length)), np.arange(length))


@given(st.integers(1, 5000), st.integers(), st.integers())
def test_is_a_bijection_for_any_keys(length, seed, epoch):
    assert np.array_equal(np.sort(image(length, seed, epoch)), np.arange(length))


@fewer(4)
@given(st.integers(1, MAX_LENGTH), st.integers(0, 100), st.data())
def test_large_lengths_stay_in_range_without_collisions(length, seed, data):
    start = data.draw(st.integers(0, max(0, length - 2000)))
    positions = np.arange(start, min(start + 2000, length))
    images = Permutation(length, seed, 3)(positions)
    assert images.min() >= 0
    assert images.max() < length
    assert len(np.unique(images)) == len(positions)


def test_goes_up_to_two_to_the_forty():
    images = Permutation(MAX_LENGTH, 1, 2)(np.arange(MAX_LENGTH - 10_000, MAX_LENGTH))
    assert len(np.unique(images)) == 10_000
    assert abs(images.mean() / MAX_LENGTH - 0.5) < 0.02
    assert images.min() < MAX_LENGTH // 500
    assert images.max() > MAX_LENGTH - MAX_LENGTH // 500


def test_a_position_maps_alike_alone_in_any_company_and_any_shape():
    permutation = Permutation(1000, 5, 6)
    whole = permutation(np.arange(1000))
    assert [int(permutation(np.array(i))) for i in range(50)] == whole[:50].tolist()
    assert np.array_equal(permutation(np.arange(1000).reshape(8, 125)[:, ::-1]), whole.reshape(8, 125)[:, ::-1])
    assert permutation(np.array([], np.int64)).shape == (0,)
    assert whole.dtype == np.int64


def test_leaves_its_argument_alone():
    positions = np.arange(100)
    Permutation(100, 0, 0)(positions)
    assert np.array_equal(positions, np.arange(100))


def test_depends_on_seed_and_on_epoch_and_does_not_mix_them_up():
    images = {tuple(image(100, seed, epoch)) for seed in (-1, 0, 1, 11, 2**70) for epoch in (0, 1, 11, 111)}
    assert len(images) == 20


@pytest.mark.parametrize("length", [2, 3, 4])
def test_every_arrangement_of_a_few_comes_about_equally_often(length):
    seeds = 2400
    counts = {arrangement: 0 for arrangement in itertools.permutations(range(length))}
    for seed in range(seeds):
        counts[tuple(image(length, seed).tolist())] += 1
    expected = seeds / len(counts)
    assert sum((c - expected) ** 2 / expected for c in counts.values()) < 60  # chi-squared, 23 degrees at most


def test_each_position_goes_everywhere_about_equally_often():
    length, seeds = 30, 1500
    counts = np.zeros((length, length))
    for seed in range(seeds):
        counts[np.arange(length), image(length, seed)] += 1
    expected = seeds / length
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 841 + 5 * (2 * 841) ** 0.5  # 29 x 29 degrees of freedom, five deviations


def test_neighbours_do_not_stay_neighbours():
    images = image(60_000)
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.02
    assert np.sum(np.abs(np.diff(images)) == 1) < 20  # two are expected
    assert np.sum(images == np.arange(60_000)) < 10  # one is expected


def test_the_bits_are_pinned_for_ever():
    """A change here silently redefines the steps of every running job: bump the wire version instead."""
    assert image(10, seed=1, epoch=0).tolist() == [4, 5, 9, 8, 0, 3, 1, 7, 6, 2]
    assert Permutation(60_000, 7, 3)(np.arange(6)).tolist() == [43347, 1780, 39214, 48155, 33219, 10550]
    ends = np.array([0, 1, MAX_LENGTH - 1])
    assert Permutation(MAX_LENGTH, -5, 2)(ends).tolist() == [813097153444, 592532237762, 1089534853030]


@pytest.mark.parametrize("length", [0, -1, MAX_LENGTH + 1])
def test_refuses_a_length_out_of_range(length):
    with pytest.raises(ConfigurationError, match=f"found {length}"):
        Permutation(length, 0, 0)


@pytest.mark.parametrize("position", [-1, 10, 2**62])
def test_refuses_a_position_out_of_range(position):
    with pytest.raises(ValueError, match=r"\[0, 10\)"):
        Permutation(10, 0, 0)(np.array([0, position]))
