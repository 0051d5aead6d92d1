"""SplitOptions: which rows are held out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from parashard.data.options import SplitOptions
from parashard.frozen_model import validated


@given(st.integers(1, 2000), st.floats(0, 1, exclude_max=True), st.integers(0, 2**40))
def test_every_row_is_on_one_side(examples, fraction, seed):
    training, held_out = SplitOptions(held_out=fraction, split_seed=seed).rows(examples)
    assert np.array_equal(np.sort(np.concatenate([training, held_out])), np.arange(examples))
    assert len(training) >= 1
    assert len(held_out) == min(int(fraction * examples), examples - 1)
    assert np.array_equal(training, np.sort(training))


def test_the_seed_chooses_the_rows_and_the_rows_are_spread():
    chosen = [SplitOptions(split_seed=seed).rows(1000)[1] for seed in (0, 0, 1)]
    assert np.array_equal(chosen[0], chosen[1])
    assert not np.array_equal(chosen[0], chosen[2])
    assert 400 < chosen[0].mean() < 600


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_refuses_what_is_no_fraction(fraction):
    with pytest.raises(ValidationError, match="held_out"):
        validated(SplitOptions, {"held_out": fraction})
