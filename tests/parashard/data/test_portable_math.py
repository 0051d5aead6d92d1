"""Logarithm and exponential: close to the exact ones, and the same bits everywhere."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.data.portable_math import exp, log, sigmoid, signed_log

POSITIVE = st.floats(1e-300, 1e300)


@given(st.lists(POSITIVE, min_size=1, max_size=9))
def test_the_logarithm_is_the_exact_one_but_for_its_last_bits(numbers: list[float]) -> None:
    found = log(np.array(numbers))
    for number, value in zip(numbers, found.tolist(), strict=True):
        assert abs(value - math.log(number)) <= 4e-16 * max(1.0, abs(math.log(number)))


@given(st.floats(-700, 700))
def test_the_exponential_is_the_exact_one_but_for_its_last_bits(number: float) -> None:
    assert exp(np.array([number]))[0] == pytest.approx(math.exp(number), rel=1e-15, abs=0)


def test_what_would_be_too_large_or_too_small_is_cut() -> None:
    assert exp(np.array([-1e9, 1e9, 0.0])).tolist() == [exp(np.array([-700.0]))[0], exp(np.array([700.0]))[0], 1.0]
    assert sigmoid(np.array([-1e9, 0.0, 1e9])) == pytest.approx([0.0, 0.5, 1.0])


def test_counts_are_on_a_logarithmic_scale_and_negative_ones_as_they_are() -> None:
    found = signed_log(np.array([0.0, 1.0, math.e - 1, -1.0, -7.0, math.nan]))
    assert found[:5] == pytest.approx([0.0, math.log(2), 1.0, -1.0, -7.0])
    assert math.isnan(found[5])


def test_the_bits_are_pinned_for_ever() -> None:
    numbers = np.arange(1, 100_001) * 0.37
    content = log(numbers).tobytes() + exp(numbers / 60 - 300).tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == "e12c4b45183b90d0"
