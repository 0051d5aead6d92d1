"""What a script may give as its examples, and how it is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.api.examples.arrays import arrays_of, rows_array
from parashard.api.examples.source import source_of
from parashard.errors import BadData

INPUTS, LABELS = np.arange(20.0).reshape(10, 2), np.arange(10) % 3


class Tensor:
    """What is taken for a tensor of PyTorch."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def is_floating_point(self) -> bool:
        return True

    def element_size(self) -> int:
        return 2

    def float(self) -> Tensor:
        return self

    def numpy(self) -> Any:
        return self.values


def test_examples_are_handed_out_as_they_are_by_index() -> None:
    source = source_of((INPUTS, LABELS), None, 0.0, 0)
    inputs, targets = source.examples(np.array([3, 0]))
    assert (inputs.dtype, inputs.tolist(), targets.dtype, targets.tolist()) == (
        np.float32,
        [[6, 7], [0, 1]],
        np.int64,
        [0, 0],
    )
    spec = source.spec
    assert (spec.examples, spec.held_out, spec.input_shape, spec.classes) == (10, 0, (2,), 3)


IDS = [2**24, 2**24 + 1, 2**24 + 2]


@pytest.mark.parametrize(
    ("given", "column"),
    [
        (np.array(IDS, np.float64), "inputs: the whole number 16777217"),
        (np.stack([[0.5, 1.5, 2.5], IDS], axis=1), "inputs: column 1: the whole number 16777217"),
        (np.array([-(2**53) + 1.0] * 3), "inputs: the whole number -9007199254740991"),
        ({"day": np.array([1764181800.0, 1764181801.0, 0])}, "inputs/day: the whole number 1764181800"),
    ],
)
def test_ids_that_float32_would_round_are_refused(given: Any, column: str) -> None:
    with pytest.raises(BadData) as refused:
        arrays_of((given, [0, 1, 0]), "data")
    assert f"data: {column} would lose its last digits as float32; give whole numbers as an integer" in str(
        refused.value
    )


def test_ids_of_a_mapped_file_are_refused_at_the_start(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array(IDS, np.float64))
    with pytest.raises(BadData, match="16777217 would lose its last digits"):
        arrays_of((np.load(tmp_path / "ids.npy", mmap_mode="r"), [0, 1, 0]), "data")


@pytest.mark.parametrize(
    "given",
    [
        np.array(IDS),  # integers keep their digits
        np.array(IDS, np.float32),  # rounded by the user
        np.array([2.0**40, 2.0**60 * 3, 1e10]),  # whole, and the same numbers in float32
        np.array([16777217.0, 0.5, 1.0]),  # measurements
    ],
)
def test_numbers_that_keep_their_digits_or_are_measured_are_taken(given: Any) -> None:
    assert len(arrays_of((given, [0, 1, 0]), "data")) == 3


def test_targets_may_be_rounded_where_that_is_little_to_their_spread() -> None:
    targets: Any = arrays_of((np.zeros(4), np.array([0, *IDS], np.float64)), "data").targets
    assert targets.tolist() == [0, 2**24, 2**24, 2**24 + 2]


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.zeros(3, np.float64), np.float32),
        (np.zeros(3, np.float16), np.float32),
        (np.zeros(3, np.int32), np.int64),
        (np.zeros(3, bool), np.bool_),
        (np.zeros(3, np.uint8), np.uint8),
        ([1, 2, 3], np.int64),
        (Tensor(np.zeros(3)), np.float32),
    ],
)
def test_numbers_have_one_of_four_types(given: Any, dtype: Any) -> None:
    assert rows_array(given, "inputs").dtype == dtype


def test_whole_numbers_above_those_of_64_bits_with_a_sign_are_refused(tmp_path: Path) -> None:
    most = np.array([0, 2**63 - 1], np.uint64)
    assert rows_array(most, "inputs").tolist() == most.tolist()
    for given in (np.array([0, 2**63], np.uint64), [2**63, 2**63]):
        with pytest.raises(BadData) as refused:
            source_of((given, np.zeros(2)), None, 0.0, 0)
        assert refused.value.message == (
            "data: inputs: found the value 9223372036854775808; a whole number is at most 9223372036854775807"
        )
    np.save(tmp_path / "ids.npy", np.array([5, 2**64 - 1], np.uint64))
    mapped = arrays_of((np.load(tmp_path / "ids.npy", mmap_mode="r"), np.zeros(2)), "data")
    assert mapped.take(np.array([0]), 0)[0].tolist() == [5]
    with pytest.raises(BadData, match=r"ids\.npy: found the value 18446744073709551615; a whole number is at most"):
        mapped.take(np.array([1]), 0)


def test_a_split_is_of_the_seed_and_takes_each_example_once() -> None:
    source = source_of((INPUTS, LABELS), None, 0.35, 5)
    assert (source.spec.examples, source.spec.held_out) == (7, 3)
    training, held_out = source.examples(np.arange(7))[0], source.held_out(0, 3)[0]
    assert sorted([*training[:, 0], *held_out[:, 0]]) == INPUTS[:, 0].tolist()
    again, other = (source_of((INPUTS, LABELS), None, 0.35, seed) for seed in (5, 6))
    assert again.spec == source.spec
    assert other.spec.fingerprint != source.spec.fingerprint


def test_what_is_handed_out_may_be_changed() -> None:
    source = source_of((INPUTS, LABELS), (INPUTS, LABELS), 0.0, 0)
    source.held_out(0, 2)[0][:] = 9
    source.examples(np.arange(2))[0][:] = 9
    assert source.held_out(0, 1)[0].tolist() == source.examples(np.array([0]))[0].tolist() == [[0, 1]]


def test_values_and_targets_of_several_axes_have_no_classes() -> None:
    assert source_of((INPUTS, INPUTS), None, 0.0, 0).spec.classes == 0
    assert source_of((LABELS, LABELS - 5), None, 0.0, 0).spec.classes == 0
    scalars = source_of((LABELS, LABELS), None, 0.0, 0).spec
    assert (scalars.input_shape, "; inputs of one number; 3 classes" in scalars.summary()) == ((), True)
    assert source_of((INPUTS, INPUTS), None, 0.0, 0).spec.summary().endswith("; 2 inputs; values")


@pytest.mark.parametrize(
    ("data", "validation", "split", "says"),
    [
        (INPUTS, None, 0.0, "data must be a pair (inputs, targets) of arrays, found ndarray"),
        ((INPUTS,), None, 0.0, "data must be a pair (inputs, targets) of arrays, found tuple of 1"),
        ((INPUTS, LABELS[:3]), None, 0.0, "data: 10 inputs and 3 targets"),
        ((INPUTS[:0], LABELS[:0]), None, 0.0, "data has no examples"),
        ((INPUTS, np.array(["a"] * 10)), None, 0.0, "data: targets are text, and due are numbers: np.unique("),
        ((INPUTS, np.array([None] * 10)), None, 0.0, "data: targets must be an array of numbers"),
        (
            (INPUTS, np.float32(1)),
            None,
            0.0,
            "data: targets must be an array of numbers with one axis for the examples",
        ),
        (([[1], [1, 2]], LABELS[:2]), None, 0.0, "data: inputs are no array"),
        ((np.where(INPUTS == 6, np.nan, INPUTS), LABELS), None, 0.0, "data: inputs: example 3 has a value that is not"),
        ((INPUTS, LABELS), (INPUTS, LABELS), 0.1, "validation_data and validation_split: allowed is one of the two"),
        ((INPUTS, LABELS), None, 1.0, "validation_split must be at least 0 and less than 1, found 1.0"),
        ((INPUTS, LABELS + 1700000000.5), None, 0.0, "data: targets: float32 rounds values by up to"),
        ((INPUTS, LABELS), None, 0.05, "validation_split=0.05 of 10 examples holds out none"),
        ((INPUTS[:1], LABELS[:1]), None, 0.5, "validation_split=0.5 of 1 example holds out none"),
        (
            (INPUTS, LABELS),
            (INPUTS[:, :1], LABELS),
            0.0,
            "validation_data: inputs are float32 of shape (1,) an example",
        ),
        ((INPUTS, LABELS), (INPUTS, LABELS * 1.0), 0.0, "validation_data: targets are float32 of shape () an example"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, validation: Any, split: float, says: str) -> None:
    with pytest.raises(BadData) as refused:
        source_of(data, validation, split, 0)
    assert says in refused.value.message
