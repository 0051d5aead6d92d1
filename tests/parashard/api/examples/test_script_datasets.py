"""Datasets of a script: items become arrays by index, and an item that is none is named."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from parashard.api.examples.indexed import indexed, indexed_inputs, joined
from parashard.api.examples.source import source_of
from parashard.data.base import BadExample, Field
from parashard.data.tree import leaves
from parashard.errors import BadData, ConfigurationError


class Squares:
    """A map-style dataset: example i is ([i, i + 1], i * i)."""

    def __init__(self, length: int = 40, item: Callable[[int], Any] | None = None) -> None:
        self.length, self.read = length, list[int]()
        self.item = item or (lambda index: (np.array([index, index + 1.0]), index * index))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.item(index)


class Many(Squares):
    """The same, which gives many at once."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self.item(index) for index in indices]


def broken(index: int) -> Any:
    if index == 7:
        raise KeyError("seven")
    return np.zeros(2), index


def some(examples: Any, indices: list[int], seed: int = 0) -> Any:
    return examples.take(np.array(indices), seed)


@pytest.mark.parametrize("kind", [Squares, Many])
def test_items_are_stacked_in_the_order_of_the_indices(kind: Any) -> None:
    inputs, targets = some(indexed(kind(), "data"), [3, 0, 5])
    assert (inputs.dtype, inputs.tolist()) == (np.float32, [[3, 4], [0, 1], [5, 6]])
    assert (targets.dtype, targets.tolist()) == (np.int64, [9, 0, 25])


def test_a_list_of_pairs_is_a_dataset_and_a_list_of_arrays_is_not() -> None:
    listed = indexed([([1.0, 2.0], 0), ([3.0, 4.0], 1)], "data")
    assert [part.tolist() for part in some(listed, [1])] == [[[3, 4]], [1]]
    assert [part.tolist() for part in some(indexed([np.eye(2), np.arange(2)], "data"), [1])] == [[[0, 1]], [1]]


def test_items_may_be_dicts_and_tuples_of_arrays_and_have_weights() -> None:
    found = indexed(Squares(item=lambda i: ({"ids": [i, i], "more": (np.zeros(3), i)}, np.uint8(i), 0.5)), "data")
    inputs, targets, weights = some(found, [1, 2])
    assert [(name, array.shape) for name, array in leaves(inputs)] == [
        ("ids", (2, 2)),
        ("more/0", (2, 3)),
        ("more/1", (2,)),
    ]
    assert (targets.dtype, weights.dtype, weights.tolist()) == (np.int64, np.float32, [0.5, 0.5])
    assert [str(field) for field in found.fields()] == [
        "inputs/ids (2) int64",
        "inputs/more/0 (3) float32",
        "inputs/more/1 () int64",
        "targets () int64",
        "weights () float32",
    ]


def test_a_dataset_may_have_a_shape_as_hugging_face_s_has() -> None:
    rows = Many(item=lambda i: {"ids": [i, i + 1], "label": i})
    rows.shape = (40, 2)  # type: ignore[attr-defined]
    inputs, targets = some(indexed(rows, "data", targets="label"), [4, 2])
    assert (inputs.tolist(), targets.tolist()) == ([[4, 5], [2, 3]], [4, 2])


@pytest.mark.parametrize(
    ("targets", "inputs", "predicted"),
    [
        ("label", {"ids": [[4, 5]], "mask": [[1, 1]]}, [4]),
        (["label", "mask"], [[4, 5]], {"label": [4], "mask": [[1, 1]]}),
    ],
)
def test_targets_of_a_dataset_of_dicts_are_named(targets: Any, inputs: Any, predicted: Any) -> None:
    rows = Squares(item=lambda i: {"ids": [i, i + 1], "label": i, "mask": [1, 1]})
    found = some(indexed(rows, "data", targets=targets), [4])
    assert [as_lists(part) for part in found] == [inputs, predicted]


def as_lists(tree: Any) -> Any:
    return {name: array.tolist() for name, array in tree.items()} if isinstance(tree, dict) else tree.tolist()


def test_outputs_are_joined_leaf_by_leaf_or_refused() -> None:
    parts = [{"a": np.zeros((rows, 2)), "b": (np.ones(rows),)} for rows in (2, 1)]
    found = joined(parts)
    assert (found["a"].shape, found["b"][0].shape) == ((3, 2), (3,))
    for wrong, says in (
        ([np.zeros((2, 2)), np.zeros((2, 3))], r"such as those of shapes \[\[\(2, 2\)\], \[\(2, 3\)\]\]"),
        ([{"a": object()}], "outputs/a is object; due is an array with a row an example"),
        ([np.array(3.0)], "outputs is ndarray; due is an array"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            joined(wrong)


def test_predictions_need_no_targets() -> None:
    for item in (lambda i: np.full(2, i), lambda i: (np.full(2, i), i)):
        found = indexed_inputs(Squares(item=item), "inputs")
        assert some(found, [3])[0].tolist() == [[3, 3]]


@pytest.mark.parametrize(
    ("item", "index", "says"),
    [
        (broken, 7, "data: example 7: KeyError: 'seven' (test_script_datasets.py:"),
        (
            lambda i: (np.zeros(2 + (i == 3)), i),
            3,
            "data: example 3 has float32 (3,), int64 (), example 0 has float32 (2,)",
        ),
        (
            lambda i: (np.zeros(2), i if i else 0.5),
            1,
            "data: example 1 has float32 (2,), int64 (), example 0 has float32 (2,), float32 ()",
        ),
        (lambda i: (np.zeros(2), "a"), 0, "data: example 0: targets are text, and due are numbers: np.unique("),
        (
            lambda i: np.zeros(2),
            0,
            "data: example 0 must be (inputs, targets) or (inputs, targets, weight), found ndarray",
        ),
        (lambda i: {"x": 1.0, "y": i}, 0, "data: example 0 has the fields x, y: say targets= which of them"),
    ],
)
def test_an_item_that_is_no_example_is_named(item: Any, index: int, says: str) -> None:
    with pytest.raises(BadExample) as refused:
        some(indexed(Squares(item=item), "data"), [index])
    assert says in refused.value.message.replace("tests/parashard/api/examples/", "")
    assert "\n" not in refused.value.message


def test_the_first_example_s_error_is_one_sentence_in_the_script() -> None:
    def raising(index: int) -> Any:
        raise ZeroDivisionError("by zero")

    with pytest.raises(BadData, match=r"data: example 0: ZeroDivisionError: by zero \(.*py:\d+\)") as refused:
        source_of(Squares(item=raising))
    assert refused.value.__cause__ is None


def test_what_an_item_draws_is_of_the_seed_and_the_script_s_generators_go_on() -> None:
    def noisy(index: int) -> Any:
        return np.array([random.random(), np.random.rand()]), index

    found = indexed(Squares(item=noisy), "data")
    random.seed(1), np.random.seed(1)
    due = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    first, other = (some(found, [0, 1], seed)[0] for seed in (5, 6))
    assert not (first == other).any()
    assert (random.random(), np.random.rand()) == due
    assert some(found, [0, 1], 5)[0].tolist() == first.tolist()


def test_the_fingerprint_is_of_the_length_and_of_examples_spread_over_it() -> None:
    data = Squares(1000)
    found = source_of(data).spec.fingerprint
    assert len(set(data.read)) == 16
    assert {0, 999} <= set(data.read)
    assert source_of(Squares(1000)).spec.fingerprint == found
    assert source_of(Squares(999)).spec.fingerprint != found
    assert source_of(Squares(1000, lambda i: (np.array([i, i + 1.0]), i * i + (i == 999)))).spec.fingerprint != found


def test_ids_beside_floats_that_float32_would_round_are_refused_by_some_examples() -> None:
    def beside(first: int) -> Squares:
        return Squares(64, lambda i: (np.array([first + i, i / 64]), i))

    with pytest.raises(BadData, match=r"inputs: column 0: the whole number 167772\d\d would lose its last digits"):
        source_of(beside(2**24))
    assert source_of(beside(0)).spec.fingerprint


def test_a_fingerprint_that_is_given_stands_for_the_content() -> None:
    data = Squares(1000)
    one, same, other = (
        source_of(given, fingerprint=text).spec
        for given, text in ((data, "a"), (Squares(1000, lambda i: (np.zeros(2), 0)), "a"), (data, "b"))
    )
    assert set(data.read) == {0}
    assert one.fingerprint == same.fingerprint != other.fingerprint
    with pytest.raises(BadData, match="fingerprint is a text that changes with the data, found 3"):
        source_of(data, fingerprint=3)  # type: ignore[arg-type]


def test_a_dataset_is_split_by_index() -> None:
    source = source_of(Squares(10), None, 0.3, 4)
    spec = source.spec
    assert (spec.examples, spec.held_out, spec.input_shape, spec.classes) == (7, 3, (2,), 0)
    targets = [*source.examples(np.arange(7))[1], *source.held_out(0, 3)[1]]
    assert sorted(targets) == [i * i for i in range(10)]
    assert spec.fields == (Field("inputs", (2,), "float32"), Field("targets", (), "int64"))


@pytest.mark.parametrize("data", [(i for i in range(3)), iter([]), {1, 2}, map(str, [])])
def test_what_can_only_be_iterated_says_what_to_pass(data: Any) -> None:
    with pytest.raises(BadData, match=r"can only be iterated, .* pass ps.cached\(data, folder\)"):
        source_of(data)


# --- datasets of batches ---


class PyDataset:
    """What is taken for Keras'."""

    on_epoch_end = on_epoch_begin = None
    sizes = (4, 4, 2)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        return {"x": np.full((self.sizes[index], 3), index)}, np.full(self.sizes[index], float(index))


class Shuffling(PyDataset):
    def on_epoch_end(self) -> None: ...


class Endless(PyDataset):
    num_batches = None


class Uneven(PyDataset):
    def __getitem__(self, index: int) -> Any:
        return np.zeros((3, 2)), np.zeros(2)


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake = types.SimpleNamespace(utils=types.SimpleNamespace(PyDataset=PyDataset))
    monkeypatch.setitem(sys.modules, "keras", fake)  # type: ignore[arg-type]
    return


@pytest.mark.usefixtures("keras")
def test_an_index_of_a_dataset_of_batches_is_a_batch() -> None:
    source = source_of(PyDataset(), PyDataset())
    spec = source.spec
    assert (spec.batched, spec.examples, spec.held_out, source.batch_size) == (True, 3, 3, 1)  # type: ignore[attr-defined]
    assert spec.summary() == "3 training batches, 3 held out; inputs x (3) int64; values"
    inputs, targets = source.examples(np.array([2]))
    assert (inputs["x"].tolist(), targets.tolist()) == ([[2, 2, 2]] * 2, [2, 2])
    assert source.held_out(0, 1)[1].tolist() == [0] * 4


@pytest.mark.usefixtures("keras")
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Shuffling, "Shuffling has on_epoch_end, and here an index is the same batch in every epoch"),
        (Endless, "Endless has no end: num_batches is None"),
        (Uneven, "batch 0: its arrays have one row for each example, found the shapes (3, 2), (2,)"),
    ],
)
def test_batches_that_are_no_steps_are_refused(data: Any, says: str) -> None:
    with pytest.raises(BadData) as refused:
        source_of(data())
    assert says in refused.value.message


@pytest.mark.usefixtures("keras")
def test_examples_do_not_go_with_batches() -> None:
    with pytest.raises(BadData, match="an item is one of examples; of data it is one of batches"):
        source_of(PyDataset(), ({"x": np.zeros((2, 3))}, np.zeros(2)))
