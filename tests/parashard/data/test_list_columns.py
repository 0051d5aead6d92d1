"""Columns of several values a cell: text with a delimiter and Parquet's lists, in training and afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.data.arrays import ArraySource
from parashard.data.cache import CacheWriter, read_cache
from parashard.data.columns import VALUES_MAX, as_lists, lists_of, words
from parashard.data.hashing import keys_of_texts, seed_of
from parashard.data.input_columns import KeysColumn
from parashard.data.options import CsvOptions, ParquetOptions
from parashard.data.preprocessing import as_json, read_preprocessing
from parashard.data.table_files import open_csv, open_parquet
from parashard.data.tree import NO_KEY
from parashard.errors import BadData

TABLE = """year,genres,label
1995,action|comedy,yes
1996,,no
1997,comedy,yes
1998,drama | comedy|comedy|,no
"""


def key(column: str, text: str) -> int:
    return int(keys_of_texts([text], seed_of(column)).view(np.int64)[0])


def keys(*texts: str, width: int = 3, column: str = "genres") -> list[int]:
    return [*(key(column, text) for text in texts), *[NO_KEY] * (width - len(texts))]


def load(folder: Path, training: str = TABLE, test: str | None = None, **options: Any) -> ArraySource:
    (folder / "train.csv").write_text(training)
    if test is not None:
        (folder / "test.csv").write_text(test)
        options["held_out_path"] = folder / "test.csv"
    given = {"label": "label", "held_out": 0.0, "list_columns": ("genres",), **options}
    return open_csv(CsvOptions(path=folder / "train.csv", **given))


def lists_in(source: ArraySource, name: str = "genres") -> Any:
    return source.examples(np.arange(source.spec.examples))[0]["lists"][name].tolist()


def test_each_value_of_a_cell_has_the_key_of_its_text(tmp_path: Path) -> None:
    source = load(tmp_path)
    assert lists_in(source) == [
        keys("action", "comedy"),
        keys(),
        keys("comedy"),
        keys("drama", "comedy", "comedy"),
    ]
    assert [str(field) for field in source.spec.fields] == [
        "inputs/numbers (1) float32",
        "inputs/keys (0) int64",
        "inputs/lists/genres (3) int64",
        "targets () int64",
    ]
    assert source.spec.figures()["text_columns"] == 1
    assert source.spec.hashed == (3, 3)


def test_keys_of_one_value_and_lists_stand_side_by_side(tmp_path: Path) -> None:
    table = TABLE.replace("year", "town").replace("199", "t199")
    source = load(tmp_path, table, key_columns=("*",))
    inputs = source.examples(np.arange(4))[0]
    assert inputs["keys"].tolist() == [[key("town", f"t{year}")] for year in range(1995, 1999)]
    assert inputs["lists"]["genres"][0].tolist() == keys("action", "comedy")


def test_a_delimiter_may_be_any_text_and_values_that_stand_for_missing_have_no_key(tmp_path: Path) -> None:
    table = "g,label\na; b;?;NA;null,x\n?,y\n;;,y\n"
    source = load(tmp_path, table, list_columns=("g",), value_delimiter=";", missing="?")
    assert lists_in(source, "g") == [keys("a", "b", width=2, column="g"), [NO_KEY] * 2, [NO_KEY] * 2]
    source = load(tmp_path, "g,label\na//b/c,x\nd,y\n", list_columns=("g",), value_delimiter="//")
    assert lists_in(source, "g") == [keys("a", "b/c", width=2, column="g"), keys("d", width=2, column="g")]


def test_cells_that_are_numbers_are_lists_of_texts(tmp_path: Path) -> None:
    source = load(tmp_path, "g,label\n1.0|2,x\n7,y\n", list_columns=("g",))
    assert lists_in(source, "g") == [keys("1", "2", width=2, column="g"), keys("7", width=2, column="g")]


def test_held_out_rows_have_the_same_width_by_a_share_and_by_a_table_of_their_own(tmp_path: Path) -> None:
    source = load(tmp_path, held_out=0.5)
    assert source.spec.fields[2].shape == (3,)
    shapes = {source.examples(np.arange(2))[0]["lists"]["genres"].shape}
    shapes.add(source.held_out(0, 2)[0]["lists"]["genres"].shape)
    assert shapes == {(2, 3)}
    source = load(tmp_path, test="label,genres,year\nno,a|b|c|comedy,1999\n")
    assert source.held_out(0, 1)[0]["lists"]["genres"].tolist() == [keys("a", "b", "c", "comedy", width=4)]
    assert lists_in(source)[2] == keys("comedy", width=4)
    assert source.spec.hashed == (6, 6)


def test_the_fingerprint_knows_which_row_has_which_value(tmp_path: Path) -> None:
    moved = TABLE.replace("1995,action|comedy", "1995,action").replace("1996,", "1996,comedy")
    assert load(tmp_path).spec.fingerprint != load(tmp_path, moved).spec.fingerprint
    assert load(tmp_path).spec.fingerprint == load(tmp_path, TABLE.replace("drama | ", "drama|")).spec.fingerprint


def test_a_cell_has_a_bound(tmp_path: Path) -> None:
    def table(values: int) -> str:
        return f"a,genres,label\n1,x,p\n2,{'|'.join(['x'] * values)},q\n"

    assert load(tmp_path, table(VALUES_MAX)).spec.fields[2].shape == (VALUES_MAX,)
    said = r"train\.csv: column 'genres', row 2 \(line 3\): found 4,097 values; allowed: at most 4,096"
    with pytest.raises(BadData, match=said):
        load(tmp_path, table(VALUES_MAX + 1))
    with pytest.raises(BadData, match=said.replace("train", "test")):
        load(tmp_path, table(1), table(VALUES_MAX + 1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"list_columns": ("tags",)}, "has no column 'tags', which data.list_columns names; its columns: year, genres"),
        ({"list_columns": ("label",)}, "data.list_columns names the label 'label'"),
        ({"ignore": ("genres",)}, "data.list_columns names 'genres', which data.ignore leaves out"),
    ],
)
def test_wrong_names_are_reported(tmp_path: Path, options: Any, said: str) -> None:
    with pytest.raises(BadData, match=rf"train\.csv: {said}"):
        load(tmp_path, **options)


def test_a_long_name_of_a_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="a name of at most 180 characters is due"):
        load(tmp_path, TABLE.replace("genres", "g" * 181), list_columns=("g" * 181,))


def test_a_value_whose_hash_would_mean_no_key_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    column = KeysColumn(name="g", delimiter="|", values_max=2)
    monkeypatch.setattr("parashard.data.input_columns.hashed", lambda texts, name: np.arange(len(texts)) - 1)
    found = column.lists_of(lists_of([["a", "b"], ["a"]]))
    assert found[:].tolist() == [[-2, 0], [-2, NO_KEY]]


# --- columns by themselves ---


def test_a_column_is_split_once_for_each_distinct_cell() -> None:
    column = words(["b|a", None, "b", "b|a"])
    lists = as_lists(column, "|")
    assert lists.vocabulary == ("b", "a")
    assert (lists.codes.tolist(), lists.offsets.tolist()) == ([0, 1, 0, 0, 1], [0, 2, 2, 3, 5])
    taken = lists.take(np.array([3, 1]))
    assert (taken.codes.tolist(), taken.offsets.tolist()) == ([0, 1], [0, 2, 2])


# --- afterwards ---


def test_rows_have_afterwards_the_keys_that_they_had_in_training(tmp_path: Path) -> None:
    source = load(tmp_path, value_delimiter="|")
    assert source.spec.preprocessing is not None
    (tmp_path / "p.json").write_bytes(as_json(source.spec.preprocessing))
    read = read_preprocessing(tmp_path / "p.json")
    assert read == source.spec.preprocessing
    assert read.fields() == source.spec.fields[:3]
    rows = [dict(zip(("year", "genres"), line.split(","), strict=False)) for line in TABLE.splitlines()[1:]]
    found = read.inputs(rows)
    np.testing.assert_array_equal(found["lists"]["genres"], lists_in(source))
    np.testing.assert_array_equal(found["numbers"], source.examples(np.arange(4))[0]["numbers"])
    assert found["keys"].shape == (4, 0)
    given: list[dict[str, Any]] = [
        {"year": 1995, "genres": ["action ", None, "comedy"]},
        {"year": 1995, "genres": None},
        {"year": 1995, "genres": np.array(["a", "b", "c", "d"])},
    ]
    assert read.inputs(given)["lists"]["genres"].tolist() == [
        keys("action", "comedy", width=4),
        keys(width=4),
        keys("a", "b", "c", "d", width=4),
    ]
    with pytest.raises(BadData, match="row 2 has no column 'genres'"):
        read.inputs([given[0], {"year": 1}])


def test_a_cache_has_the_arrays_as_they_are_handed_out(tmp_path: Path) -> None:
    inputs, targets = load(tmp_path).examples(np.arange(4))
    with CacheWriter(tmp_path / "cache", "") as writer:
        writer.write((inputs, targets))
    read = read_cache(tmp_path / "cache", "")
    assert read is not None
    np.testing.assert_array_equal(read[0]["lists"]["genres"], inputs["lists"]["genres"])


# --- of Parquet ---


@pytest.fixture
def write(tmp_path: Path) -> Any:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def written(name: str = "a.parquet", **columns: Any) -> ParquetOptions:
        parquet.write_table(pa.table(columns), tmp_path / name)
        return ParquetOptions(path=tmp_path / name, label="label", held_out=0.0, list_columns=("genres",))

    return written


def test_parquet_has_the_keys_of_the_same_table_in_text(tmp_path: Path, write: Any) -> None:
    lists = [["action", "comedy"], None, ["comedy"], ["drama", None, "comedy ", "comedy", ""]]
    columns = {"year": [1995, 1996, 1997, 1998], "label": ["yes", "no", "yes", "no"]}
    options = write(genres=[list(map(str.strip, filter(None, one))) if one else one for one in lists], **columns)
    found, due = open_parquet(options), load(tmp_path)
    assert set(found.spec.fields) == set(due.spec.fields)
    assert lists_in(found) == lists_in(due)
    for more in ({"list_columns": (), "key_columns": ("*",)}, {"list_columns": (), "key_columns": ("genres",)}):
        assert open_parquet(options.replaced(**more)).spec == found.spec
    assert lists_in(open_parquet(write(genres=[one and "|".join(filter(None, one)) for one in lists], **columns))) == (
        lists_in(due)
    )


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed_list", "chunked", "sliced"])
def test_lists_of_every_type_are_read(tmp_path: Path, write: Any, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    lists = [[1, 2**60 + 1], None, [7, None]]
    of = {
        "list": lambda: pa.array(lists, pa.list_(pa.int64())),
        "large_list": lambda: pa.array(lists, pa.large_list(pa.int64())),
        "fixed_list": lambda: pa.array(lists, pa.list_(pa.int64(), 2)),
        "chunked": lambda: pa.chunked_array([pa.array(one, pa.list_(pa.int64())) for one in (lists[:1], lists[1:])]),
        "sliced": lambda: pa.array([[5], *lists], pa.list_(pa.int64())).slice(1),
    }[kind]()
    found = open_parquet(write(genres=of, label=["x", "y", "x"]))
    assert lists_in(found) == [
        keys("1", str(2**60 + 1), width=2),
        keys(width=2),
        keys("7", width=2),
    ]  # to the last digit


def test_lists_of_other_values_are_texts_of_them(write: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    floats = open_parquet(write(genres=pa.array([[0.5, 2.0], []]), label=["x", "y"]))
    assert lists_in(floats)[0] == keys("0.5", "2", width=2)
    encoded = pa.array([["a", "b"], ["a"]]).cast(pa.list_(pa.dictionary(pa.int32(), pa.string())))
    assert lists_in(open_parquet(write(genres=encoded, label=["x", "y"])))[1] == keys("a", width=2)


def test_a_held_out_table_must_have_lists_where_training_has_them_and_no_others(tmp_path: Path, write: Any) -> None:
    held_out = write("b.parquet", genres=[["a"], ["b"]], label=["x", "y"]).path
    training = write(genres=["a|b", "c"], label=["x", "y"])
    options = training.replaced(held_out_path=held_out)
    assert open_parquet(options).held_out(0, 1)[0]["lists"]["genres"].tolist() == [keys("a", width=2)]
    with pytest.raises(BadData, match=r"b\.parquet: column 'genres': has lists, and the training table has none there"):
        open_parquet(options.replaced(list_columns=()))
