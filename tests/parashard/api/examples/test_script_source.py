"""The source of a script's fit: named arrays, weights, transforms, and data that are larger than memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.api.examples import arrays
from parashard.api.examples.source import source_of
from parashard.data.base import BadExample, Field, examples_of
from parashard.data.generated import SyntheticSource
from parashard.data.options import SyntheticOptions
from parashard.errors import BadData

IDS, MASK, LABELS = np.arange(24).reshape(8, 3), np.ones((8, 3), bool), np.arange(8) % 3
NAMED = {"ids": IDS, "mask": MASK}


def test_inputs_may_be_a_dict_of_arrays() -> None:
    source = source_of((NAMED, LABELS), (NAMED, LABELS))
    inputs, targets = source.examples(np.array([2, 0]))
    assert {name: array.tolist() for name, array in inputs.items()} == {
        "ids": [[6, 7, 8], [0, 1, 2]],
        "mask": [[1] * 3] * 2,
    }
    assert targets.tolist() == [2, 0]
    assert source.held_out(1, 2)[0]["ids"].tolist() == [[3, 4, 5]]
    assert source.spec.fields == (
        Field("inputs/ids", (3,), "int64"),
        Field("inputs/mask", (3,), "bool"),
        Field("targets", (), "int64"),
    )
    assert "inputs ids (3) int64, mask (3) bool; 3 classes" in source.spec.summary()


def test_names_are_part_of_the_fingerprint() -> None:
    one, other = (source_of((inputs, LABELS)).spec.fingerprint for inputs in (NAMED, {"ids": IDS, "mark": MASK}))
    assert one != other


def test_tuples_are_several_arrays_and_so_are_targets() -> None:
    inputs, targets = source_of(((IDS, (MASK,)), [LABELS, IDS])).examples(np.array([1]))
    assert (type(inputs), inputs[0].tolist(), inputs[1][0].tolist()) == (tuple, [[3, 4, 5]], [[1, 1, 1]])
    assert (type(targets), targets[0].tolist()) == (list, [1])


def test_targets_of_a_dict_of_arrays_are_named() -> None:
    inputs, targets = source_of({**NAMED, "label": LABELS}, targets="label").examples(np.array([1]))
    assert (sorted(inputs), targets.tolist()) == (["ids", "mask"], [1])


@pytest.mark.parametrize(("given", "due"), [({"validation_data": (IDS, LABELS)}, 4), ({"validation_split": 0.5}, 3)])
def test_validation_steps_judge_the_first_of_the_held_out_examples(given: Any, due: int) -> None:
    whole = source_of((IDS, LABELS), **given)
    some = source_of((IDS, LABELS), **given, held_out_max=lambda held_out: due)
    assert (some.spec.held_out, some.spec.examples) == (due, whole.spec.examples)
    assert some.held_out(0, due)[0].tolist() == whole.held_out(0, due)[0].tolist()
    assert some.spec.fingerprint != whole.spec.fingerprint
    assert source_of((IDS, LABELS), **given, held_out_max=lambda held_out: 99).spec == whole.spec


def test_a_source_of_a_job_file_is_taken_as_it_is() -> None:
    source = SyntheticSource(SyntheticOptions(examples=4, held_out=2))
    assert source_of(source) is source
    with pytest.raises(BadData, match="a data source has its own targets, weights, transforms and held-out examples"):
        source_of(source, validation_split=0.5)


# --- weights ---


@pytest.mark.parametrize("how", ["an argument", "a third item"])
def test_examples_have_weights(how: str) -> None:
    weights = np.arange(8.0)
    given = {"sample_weight": weights} if how == "an argument" else {}
    data = (IDS, LABELS) if given else (IDS, LABELS, weights)
    source = source_of(data, None, 0.25, **given)  # type: ignore[arg-type]
    inputs, _, held = source.held_out(0, 2)
    assert held.tolist() == (inputs[:, 0] / 3).tolist()
    assert source.examples(np.array([0]))[2].dtype == np.float32
    assert source.weighted  # type: ignore[attr-defined]


def test_validation_data_may_have_weights_of_their_own_or_none() -> None:
    for data, validation, lengths in (
        ((IDS, LABELS, LABELS), (IDS, LABELS), (3, 2)),
        ((IDS, LABELS), (IDS, LABELS, LABELS), (2, 3)),
    ):
        source = source_of(data, validation)
        assert (len(source.examples(np.arange(2))), len(source.held_out(0, 2))) == lengths
        assert source.weighted  # type: ignore[attr-defined]


def test_a_class_has_a_weight_and_others_have_one() -> None:
    source = source_of((IDS, LABELS), (IDS, LABELS), class_weight={1: 2.5, 2: 0})
    assert source.examples(np.arange(4))[2].tolist() == [1, 2.5, 0, 1]
    assert len(source.held_out(0, 4)) == 2, "not in an evaluation"
    assert source.spec.fields[-1] == Field("weights", (), "float32")
    assert source_of((IDS, LABELS), (IDS, LABELS)).spec.fingerprint != source.spec.fingerprint
    column = source_of((IDS, LABELS[:, None]), class_weight={2: 4.0})
    assert column.examples(np.arange(3))[2].tolist() == [1, 1, 4]


@pytest.mark.parametrize(
    "targets",
    [LABELS * 1.0, LABELS[:, None] * np.float32(1), np.eye(3)[LABELS], np.eye(3, dtype=np.int64)[LABELS]],
    ids=["floats", "column", "one-hot", "whole one-hot"],
)
def test_labels_of_whatever_form_have_their_class_s_weight(targets: Any) -> None:
    source = source_of((IDS, targets), class_weight={1: 2.5, 2: 0})
    assert source.examples(np.arange(4))[2].tolist() == [1, 2.5, 0, 1]


def test_labels_that_are_true_or_false_have_weights() -> None:
    source = source_of((IDS, LABELS == 1), class_weight={True: 2.5})
    assert source.examples(np.arange(4))[2].tolist() == [1, 2.5, 1, 1]


def test_a_target_that_is_no_label_is_found_where_it_is() -> None:
    source = source_of((IDS, np.array([0.0, 1, 1.5, 0, 0, 0, 0, 0])), class_weight={1: 2.0})
    with pytest.raises(BadExample, match=r"class_weight needs targets of one whole number .*; found 1\.5"):
        source.examples(np.array([1, 2]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"sample_weight": np.ones(7)}, "data: weights are one number for each of 8 examples, found shape (7,)"),
        ({"sample_weight": np.ones((8, 1))}, "found shape (8, 1)"),
        ({"sample_weight": np.full(8, np.nan)}, "data: weights: example 0 has a value that is not finite"),
        ({"data": [(1.0, 2)], "sample_weight": [1.0]}, "sample_weight is for a pair (inputs, targets) of arrays"),
        ({"data": (IDS, LABELS, LABELS), "sample_weight": LABELS}, "sample_weight is for a pair"),
        ({"sample_weight": LABELS, "class_weight": {0: 1}}, "class_weight and weights of examples: allowed is one"),
        ({"data": (IDS, LABELS + 0.5), "class_weight": {0: 1}}, "class_weight needs targets of one whole number"),
        ({"data": (IDS, IDS), "class_weight": {0: 1}}, "found [0, 1, 2]"),
        ({"data": (IDS, IDS[:, None]), "class_weight": {0: 1}}, "class_weight needs targets of one whole number"),
        (
            {"class_weight": [1, 2]},
            "class_weight is a dict of labels and weights, such as {0: 1.0, 1: 5.0}, found [1, 2]",
        ),
        ({"class_weight": {"a": 1}}, "class_weight: found 'a': 1; allowed are labels and weights of at least 0"),
        ({"class_weight": {0: -1.0}}, "class_weight: found 0: -1.0"),
        ({"targets": "label"}, "targets= names fields of a dict, a table or a dataset of dicts; data is tuple"),
        ({"data": {"a": IDS}}, "data has the fields a: say targets="),
        (
            {"data": NAMED, "targets": "label"},
            "data: targets='label' leaves no field 'label'; its fields are ids, mask",
        ),
        ({"data": NAMED, "targets": ["ids", "mask"]}, "leaves nothing else"),
        ({"data": ({"a": IDS, "b": IDS[:4]}, LABELS)}, "data: 8 inputs/a and 4 inputs/b and 8 targets"),
        (
            {"data": ([IDS, IDS], LABELS[:2])},
            "a tuple or list of arrays is several inputs: numpy.stack makes one array",
        ),
        ({"data": ({"a/b": IDS}, LABELS)}, "data: inputs: a dict's keys are names without '/', found 'a/b'"),
        ({"data": ({}, LABELS)}, "data: inputs have no arrays"),
        (
            {"data": (NAMED, LABELS), "validation_data": (IDS, LABELS)},
            "validation_data has the arrays inputs, targets; data has inputs/ids, inputs/mask, targets",
        ),
        ({"validation_data": (IDS[:0], LABELS[:0])}, "validation_data has no examples"),
        ({"data": np.eye(3)}, "found ndarray; or (inputs, targets, weights), or a dataset with a length"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: Any, says: str) -> None:
    with pytest.raises(BadData) as refused:
        source_of(**{"data": (IDS, LABELS), **arguments})
    assert says in refused.value.message


# --- larger than memory ---


def test_a_mapped_array_is_read_where_examples_are_asked_for(tmp_path: Path) -> None:
    rows, width = 1 << 20, 1 << 8  # 2 GiB, of which nothing is on the disk
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float64, (rows, width))
    mapped[rows - 1] = 3.0
    given = np.load(tmp_path / "x.npy", mmap_mode="r")
    targets = np.arange(rows)
    tracemalloc.start()
    source = source_of((given, targets), None, 0.1)
    inputs, _ = source.examples(np.array([5, 6]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    assert (inputs.dtype, inputs.shape) == (np.float32, (2, width))
    whole = source_of((given, targets))
    assert whole.examples(np.array([rows - 1]))[0].max() == 3.0
    mapped[rows - 1] = 4.0
    assert source_of((given, targets)).spec.fingerprint != whole.spec.fingerprint, "the last row is sampled"


def test_of_a_mapped_array_rows_spread_over_it_are_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "SAMPLED_ROWS", 3)
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.int32, (9, 2))
    found = []
    for row in (0, 1, 4, 8):
        mapped[row] += 1
        found.append(source_of((mapped, np.arange(9))).spec.fingerprint)
    assert found[0] == found[1], "row 1 is none of them"
    assert len(set(found)) == 3


# --- transforms ---


def noisy(example: Any, rng: np.random.Generator) -> Any:
    inputs, targets = example
    return inputs + rng.normal(size=inputs.shape), targets


def test_a_transform_is_of_the_seed_the_step_and_the_example() -> None:
    source, other = (source_of((IDS, LABELS), (IDS, LABELS), 0.0, seed, transform=noisy) for seed in (1, 2))
    first, same, turned = (examples_of(source, 3, np.array(rows))[0] for rows in ([0, 1], [0, 1], [1, 0]))
    assert first.dtype == np.float32
    assert np.array_equal(first, same)
    assert np.array_equal(first, turned[::-1]), "whichever place it has in the step"
    assert not np.array_equal(first, examples_of(source, 4, np.array([0, 1]))[0])
    assert not (first == examples_of(other, 3, np.array([0, 1]))[0]).any()
    assert source.held_out(0, 2)[0].dtype == np.int64, "what is judged is as it is"


def test_a_transform_of_a_batch_has_all_of_its_arrays() -> None:
    def flipped(batch: Any, rng: np.random.Generator) -> Any:
        inputs, targets = batch
        return {"turned": inputs["ids"][:, ::-1]}, targets + len(targets)

    source = source_of((NAMED, LABELS, np.ones(8)), transform=flipped)
    inputs, targets, weights = examples_of(source, 0, np.array([1, 2]))
    assert (inputs["turned"].tolist(), targets.tolist(), weights.tolist()) == ([[5, 4, 3], [8, 7, 6]], [3, 4], [1, 1])


def raising(example: Any, rng: Any) -> Any:
    raise ValueError("no such crop")


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (
            raising,
            "transform of example 0: ValueError: no such crop (tests/parashard/api/examples/test_script_source.py:",
        ),
        (lambda example, rng: 3, "transform of example 0: returned int; due is (inputs, targets)"),
        (
            lambda batch, rng: (batch[0][:0], batch[1]),
            "transform of step 0: arrays have one row for each of 1 examples",
        ),
        (lambda example: example, "transform is a function of (example, rng) or (batch, rng), found one of (example)"),
        (3, "transform is a function of (example, rng)"),
    ],
)
def test_a_transform_that_makes_no_example_is_refused_before_anything_is_started(transform: Any, says: str) -> None:
    with pytest.raises(BadData) as refused:
        source_of((IDS, LABELS), transform=transform)
    assert says in refused.value.message


def test_a_transform_gives_the_examples_of_a_step_one_shape() -> None:
    source = source_of((IDS, LABELS), transform=lambda example, rng: (example[0][: 1 + example[1]], example[1]))
    with pytest.raises(Exception, match=r"transform of example 1: returned the shapes \[\(2,\), \(\)\], and"):
        examples_of(source, 0, np.array([0, 1]))


def test_what_is_read_ahead_and_by_any_thread(tmp_path: Path) -> None:
    """A transform and a dataset may draw from generators that a model seeds; memory is read faster than told of."""
    np.save(tmp_path / "ids.npy", IDS)
    mapped = np.load(tmp_path / "ids.npy", mmap_mode="r")
    pairs = [(IDS[row], LABELS[row]) for row in range(8)]
    found = {
        "in memory": source_of((IDS, LABELS)),
        "mapped": source_of((mapped, LABELS)),
        "transformed": source_of((mapped, LABELS), transform=lambda example, rng: example),
        "a dataset": source_of(pairs),
    }
    told = {name: (source.reads_ahead, source.any_thread) for name, source in found.items()}  # type: ignore[attr-defined]
    assert told == {
        "in memory": (False, True),
        "mapped": (True, True),
        "transformed": (False, False),
        "a dataset": (False, False),
    }
