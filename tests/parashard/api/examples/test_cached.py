"""Examples without indices: written once, whole or not at all, and mapped; Parquet files row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.examples import cached as module
from parashard.api.examples.source import source_of
from parashard.data import data_files
from parashard.data.tree import leaves
from parashard.errors import BadData, ConfigurationError


def texts(count: int = 5) -> Iterator[Any]:
    for i in range(count):
        yield {"ids": [i, i + 1], "more": (np.full(1, i / 2),)}, i % 2, 0.5


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 2)


def test_examples_are_written_once_and_mapped(tmp_path: Path) -> None:
    inputs, targets, weights = ps.cached(texts(), tmp_path / "cache")
    assert all(isinstance(array, np.memmap) for _, array in leaves((inputs, targets, weights)))
    assert inputs["ids"].tolist() == [[i, i + 1] for i in range(5)]
    assert (type(inputs["more"]), inputs["more"][0].tolist()) == (tuple, [[i / 2] for i in range(5)])
    assert (targets.tolist(), weights.tolist()) == ([0, 1, 0, 1, 0], [0.5] * 5)
    again = ps.cached(pytest.fail, tmp_path / "cache")  # type: ignore[arg-type]  # it is not iterated
    assert again[0]["ids"].tolist() == inputs["ids"].tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_ids_beside_floats_of_a_file_are_refused(tmp_path: Path, kind: Any) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"user": np.array([2**24, 2**24 + 1], kind), "price": [1.5, 2.0], "y": np.array([2.0**24 + 1, 1])}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(BadData, match="column 'user': the whole number 16777217 would lose its last digits"):
        ps.parquet(tmp_path / "a.parquet", inputs=["user", "price"], targets="y")
    assert ps.parquet(tmp_path / "a.parquet", inputs=["price"], targets="y")[1].tolist() == [2**24, 1]
    if kind is np.int64:
        assert ps.parquet(tmp_path / "a.parquet", inputs=["user"], targets="y")[0].tolist() == [[2**24], [2**24 + 1]]


def test_an_index_of_a_file_is_no_input_unless_it_is_named(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"a": [1, 2], "y": [0, 1], "__index_level_0__": [7, 3]}), tmp_path / "a.parquet")
    with pytest.raises(BadData, match="column '__index_level_0__' is an index that pandas wrote"):
        ps.parquet(tmp_path / "a.parquet", targets="y")
    assert ps.parquet(tmp_path / "a.parquet", inputs=["a"], targets="y")[0].tolist() == [[1], [2]]


def test_whole_numbers_beyond_int64_of_a_file_are_refused(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"user": np.array([2**63], np.uint64), "y": [0]}), tmp_path / "a.parquet")
    with pytest.raises(BadData, match="column 'user': found the value 9223372036854775808"):
        ps.parquet(tmp_path / "a.parquet", inputs=["user"], targets="y")


def test_what_is_cached_is_data_of_a_fit(tmp_path: Path) -> None:
    source = source_of(ps.cached(texts(), tmp_path / "cache"), None, 0.4)
    assert [str(field) for field in source.spec.fields] == [
        "inputs/ids (2) int64",
        "inputs/more/0 (1) float32",
        "targets () int64",
        "weights () float32",
    ]
    assert (source.spec.examples, source.spec.held_out) == (3, 2)


def test_dicts_name_their_targets(tmp_path: Path) -> None:
    inputs, targets = ps.cached(({"x": i, "y": -i} for i in range(3)), tmp_path / "cache", targets="y")
    assert (inputs.tolist(), targets.tolist()) == ([0, 1, 2], [0, -1, -2])


def raising() -> Iterator[Any]:
    yield 1, 2
    raise OSError("the line is dead")


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        (raising(), "data: example 1: OSError: the line is dead (tests/parashard/api/examples/test_cached.py:"),
        (((np.zeros(2 + (i == 3)), i) for i in range(5)), "data: example 3 has float32 (3,), int64 (), example 0 has"),
        (((np.nan, i) for i in range(2)), "data: example 0 has a value that is not finite"),
        (iter([]), "cache: nothing is written: there are no examples"),
        (iter([3]), "data: example 0 must be (inputs, targets)"),
    ],
)
def test_what_cannot_be_used_leaves_nothing(examples: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadData) as refused:
        ps.cached(examples, tmp_path / "cache")
    assert says in refused.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("dear diary")
    with pytest.raises(BadData, match=r"is no folder of cached examples \(it lacks examples.json\): name another"):
        ps.cached(texts(), tmp_path)
    (tmp_path / "examples.json").write_text("{")
    with pytest.raises(BadData, match="is damaged"):
        ps.cached(texts(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["examples.json", "mine"]


def test_two_processes_may_write_the_same(tmp_path: Path) -> None:
    def slow() -> Iterator[Any]:
        yield from texts(3)
        ps.cached(texts(), tmp_path / "cache")  # the other one is done first
        yield from texts(2)

    assert ps.cached(slow(), tmp_path / "cache")[1].tolist() == [0, 1, 0, 1, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_job_file_s_source_is_opened_by_name() -> None:
    source = ps.open_data("synthetic", examples=6, features=3)
    assert source_of(source) is source
    assert (source.spec.examples, source.spec.input_shape) == (6, (3,))
    for options, says in (
        ({"source": "synthetic", "exmples": 1}, r"open_data: exmples: unknown key; did you mean examples\?"),
        ({"source": "cvs"}, 'open_data: source: found "cvs"; allowed: clicks, criteo, '),
        ({"source": "npz"}, "open_data: path: missing; needed: The archive."),
    ):
        with pytest.raises(ConfigurationError, match=says):
            ps.open_data(**options)


# --- Parquet ---

pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")


def write(path: Path, **columns: Any) -> str:
    parquet.write_table(pa.table(columns), path, row_group_size=3)
    return str(path)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(data_files, "ROWS_AT_ONCE", 2)
    for part in range(2):
        rows = np.arange(part * 5, part * 5 + 5)
        fixed = pa.array([[i, i] for i in rows], pa.list_(pa.int32(), 2))
        write(
            tmp_path / f"{part}.parquet",
            age=rows, paid=rows / 2, left=rows % 2 == 0, ids=fixed, nested=[[[i], [i]] for i in rows], city=["a"] * 5,
        )  # fmt: skip
    return f"{tmp_path}/*.parquet"


@pytest.mark.parametrize("cached", [False, True])
def test_rows_of_files_are_arrays_one_after_the_other(table: str, cached: bool, tmp_path: Path) -> None:
    cache = tmp_path / "cache" if cached else None
    inputs, targets = ps.parquet(table, inputs=["age", "paid"], targets="left", cache=cache)
    assert (inputs.dtype, inputs.tolist()) == (np.float32, [[i, i / 2] for i in range(10)])
    assert (targets.dtype, targets.tolist()) == (np.int64, [1, 0] * 5)
    assert isinstance(inputs, np.memmap) == cached
    several, both = ps.parquet(table, inputs=["ids", "age", "nested"], targets=["left", "paid"])
    assert (several["ids"].shape, several["nested"].shape, several["age"].shape) == ((10, 2), (10, 2, 1), (10,))
    assert sorted(both) == ["left", "paid"]
    one, _ = ps.parquet(table, inputs=["age"], targets="left")
    assert (one.shape, one.dtype) == ((10, 1), np.int64)


def test_a_cache_of_other_rows_is_refused(table: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        ps.parquet(table, inputs=["age"], targets="left", cache=cache)
    with pytest.raises(BadData, match="has examples of other data: delete the folder, or name another"):
        ps.parquet(table, inputs=["paid"], targets="left", cache=cache)
    write(tmp_path / "0.parquet", age=[1, 2], left=[True, False])
    with pytest.raises(BadData, match="has examples of other data"):
        ps.parquet(table, inputs=["age"], targets="left", cache=cache)
    assert json.loads((cache / "examples.json").read_text())["examples"] == 10


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"targets": "left"}, "0.parquet: column 'city': is string; allowed are numbers, booleans, and lists of these"),
        ({"inputs": ["aeg"], "targets": "left"}, "0.parquet: has no column 'aeg'; its columns: age, paid, left, ids"),
        ({"inputs": ["age"], "targets": "age"}, "targets='age' leaves nothing else"),
        ({"files": "{}/x-*.parquet", "targets": "left"}, "x-*.parquet: there is no such file"),
        ({"files": "{}/none.parquet", "targets": "left"}, "none.parquet: cannot be read"),
        (
            {"files": "none://x", "targets": "left"},
            "none://x: none:// is not read; allowed are paths, file://, az://, gs://, ",
        ),
    ],
)
def test_columns_that_are_no_arrays_are_named(table: str, arguments: Any, says: str, tmp_path: Path) -> None:
    files = arguments.get("files", table).format(tmp_path)
    with pytest.raises(ConfigurationError) as refused:
        ps.parquet(files, cache=tmp_path / "cache", **{k: v for k, v in arguments.items() if k != "files"})
    assert says in refused.value.message
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ([1.0, None, 2.0], "column 'x': row 1 has no value"),
        ([1.0, 2.0, 3.0, 4.0, np.inf], "column 'x': row 4 is not finite"),
        ([[1], [2, 3]], "column 'x': its lists have 1 to 2 items; allowed is one length"),
        ([[1], [None]], "column 'x': its lists, item by item: row 1 has no value"),
    ],
)
def test_a_row_that_is_no_example_is_named(column: Any, says: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", x=column, y=range(len(column)))
    with pytest.raises(BadData) as refused:
        ps.parquet(file, targets="y")
    assert says in refused.value.message
    assert ps.parquet(write(tmp_path / "b.parquet", x=[1], y=[2]), targets="y")[1].tolist() == [2]


def test_a_column_has_one_type_in_all_files(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.parquet", x=[1], y=[0]), write(tmp_path / "b.parquet", x=[1.5], y=[0])]
    with pytest.raises(BadData, match=r"b.parquet: column 'x' is float32 \(\), and int64 \(\) before"):
        ps.parquet(files, targets="y")
