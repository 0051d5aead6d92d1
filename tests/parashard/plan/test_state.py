"""State without gradients: what a kind is, and whole numbers of 64 bits as float32."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ConfigurationError
from parashard.plan.state import average_factor, check_state, counter_rows, counter_values
from parashard.plan.variables import Variable, as_exported, as_imported

INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize("state", ["", "average:0.1", "average:1", "average:1e-5", "counter", "sum"])
def test_kinds(state: str) -> None:
    assert check_state(state) is None


@pytest.mark.parametrize("state", ["average", "average:0", "average:-1", "average:1.1", "average:nan", "seed", 3, None])
def test_what_is_no_kind_is_a_sentence(state: object) -> None:
    assert "state must be average:M with 0 < M <= 1" in str(check_state(state))


def test_the_factor_of_an_average() -> None:
    assert average_factor("average:0.25") == 0.25


@given(st.lists(INT64, min_size=1, max_size=5))
def test_whole_numbers_are_their_bytes(numbers: list[int]) -> None:
    rows = counter_rows(numbers)
    assert (rows.shape, rows.dtype, rows.min() >= 0, rows.max() <= 255) == ((len(numbers), 8), np.float32, True, True)
    assert counter_values(rows).tolist() == numbers


@given(st.lists(INT64, min_size=1, max_size=50))
def test_the_sum_of_rows_is_the_sum_of_numbers_modulo_2_to_the_64(numbers: list[int]) -> None:
    total = np.sum([counter_rows(number) for number in numbers], axis=0, dtype=np.float32)
    assert (int(counter_values(total)[0]) - sum(numbers)) % 2**64 == 0


def test_a_scalar_is_one_row_and_floats_are_refused() -> None:
    assert counter_rows(np.int32(-1)).tolist() == [[255.0] * 8]
    with pytest.raises(ConfigurationError, match="a counter has whole numbers, found float64"):
        counter_rows(1.5)


def test_a_file_for_other_programs_has_counters_as_whole_numbers() -> None:
    variables = {"n": Variable("n", (2, 3, 8), state="counter"), "w": Variable("w", (2,))}
    values = {"n": counter_rows(np.arange(6).reshape(2, 3)), "w": np.ones(2, np.float32)}
    exported = as_exported(values, variables)
    assert (exported["n"].dtype, exported["n"].tolist()) == (np.int64, [[0, 1, 2], [3, 4, 5]])
    back = as_imported(exported)
    assert {name: value.tobytes() for name, value in back.items()} == {n: v.tobytes() for n, v in values.items()}
