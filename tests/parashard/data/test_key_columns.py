"""Columns that become keys of embedding tables, of text and of Parquet, in training and afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from parashard.data.arrays import ArraySource
from parashard.data.hashing import keys_of_texts, seed_of
from parashard.data.input_columns import KeyColumn, NumberColumn
from parashard.data.options import CsvOptions, ParquetOptions
from parashard.data.preprocessing import as_json, read_preprocessing
from parashard.data.table_files import open_csv, open_parquet
from parashard.errors import BadData
from parashard.frozen_model import validated

TABLE = """age,city,home,zip,label
20,Bonn,Köln,1.0,yes
30,?,Bonn,1,no
40,Köln,,1.0,yes
50,Bonn,Bonn,7,no
"""


def key(column: str, text: str) -> int:
    return int(keys_of_texts([text], seed_of(column)).view(np.int64)[0])


def load(folder: Path, training: str = TABLE, held_out: str | None = None, **options: Any) -> ArraySource:
    (folder / "train.csv").write_text(training)
    if held_out is not None:
        (folder / "test.csv").write_text(held_out)
        options["held_out_path"] = folder / "test.csv"
    given = {"label": "label", "missing": "?", "held_out": 0.0, "key_columns": ("*",), **options}
    return open_csv(CsvOptions(path=folder / "train.csv", **given))


def inputs_of(source: ArraySource) -> dict[str, Any]:
    inputs, _ = source.examples(np.arange(source.spec.examples))
    assert isinstance(inputs, dict)
    return inputs


def test_a_cell_s_key_is_the_hash_of_its_text_by_its_column(tmp_path: Path) -> None:
    source = load(tmp_path)
    inputs = inputs_of(source)
    assert inputs["keys"].dtype == np.int64
    assert inputs["keys"].tolist() == [
        [key("city", "Bonn"), key("home", "Köln")],
        [key("city", ""), key("home", "Bonn")],
        [key("city", "Köln"), key("home", "")],
        [key("city", "Bonn"), key("home", "Bonn")],
    ]
    assert inputs["numbers"].dtype == np.float32
    ages = (np.array([20, 30, 40, 50]) - 35) / np.std([20, 30, 40, 50])
    np.testing.assert_allclose(inputs["numbers"][:, 0], ages, rtol=1e-6)
    assert [str(field) for field in source.spec.fields] == [
        "inputs/numbers (2) float32",
        "inputs/keys (2) int64",
        "targets () int64",
    ]
    assert source.spec.input_shape == ()
    assert source.spec.figures()["text_columns"] == 2


def test_equal_texts_and_missing_cells_of_two_columns_have_different_keys(tmp_path: Path) -> None:
    keys = inputs_of(load(tmp_path, "a,b,label\nx,x,p\n,,q\n"))["keys"]
    assert len(set(keys.ravel().tolist())) == 4


def test_every_cell_that_stands_for_a_missing_value_has_one_key(tmp_path: Path) -> None:
    keys = inputs_of(load(tmp_path, "a,b,label\nx,1,p\n?,1,q\nNA,1,q\n n/a ,1,q\nNull,1,q\n,1,q\n"))["keys"]
    assert keys[1:, 0].tolist() == [key("a", "")] * 5
    assert keys[0, 0] == key("a", "x")


def test_a_text_that_training_lacks_has_its_key_all_the_same(tmp_path: Path) -> None:
    source = load(tmp_path, held_out="zip,label,home,age,city\n9,no,Rom,35,Bonn\n9,yes,?,35,Ulm\n")
    inputs, targets = source.held_out(0, 2)
    assert inputs["keys"].tolist() == [[key("city", "Bonn"), key("home", "Rom")], [key("city", "Ulm"), key("home", "")]]
    assert inputs["numbers"][:, 0].tolist() == [0.0, 0.0]
    assert targets.tolist() == [0, 1]


def test_a_star_is_all_texts_and_the_categorical_columns(tmp_path: Path) -> None:
    source = load(tmp_path, categorical=("zip",))
    assert source.spec.preprocessing is not None
    columns = source.spec.preprocessing.columns or ()
    assert {column.name: type(column) for column in columns} == {
        "age": NumberColumn,
        "city": KeyColumn,
        "home": KeyColumn,
        "zip": KeyColumn,
    }
    zips = inputs_of(source)["keys"][:, 2]
    assert zips.tolist() == [key("zip", text) for text in ("1", "1", "1", "7")]  # "1.0" is "1"


def test_named_columns_become_keys_and_the_others_inputs(tmp_path: Path) -> None:
    inputs = inputs_of(load(tmp_path, key_columns=("zip", "home"), ignore=("age",)))
    assert inputs["keys"].tolist()[0] == [key("home", "Köln"), key("zip", "1")]  # in the table's order
    assert inputs["numbers"].tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]  # Bonn, Köln, missing


def test_a_table_may_have_nothing_but_keys(tmp_path: Path) -> None:
    inputs = inputs_of(load(tmp_path, "a,label\nx,p\ny,q\n"))
    assert inputs["numbers"].shape == (2, 0)
    assert inputs["keys"].tolist() == [[key("a", "x")], [key("a", "y")]]


def test_without_a_text_a_star_changes_nothing(tmp_path: Path) -> None:
    inputs, _ = load(tmp_path, "a,label\n1,p\n3,q\n").examples(np.arange(2))
    assert inputs.tolist() == [[-1], [1]]


def test_a_column_of_ids_is_not_warned_of_where_it_becomes_keys(tmp_path: Path) -> None:
    table = "id,b,label\n" + "".join(f"u{n},{n % 3},{'pq'[n % 2]}\n" for n in range(60))
    assert load(tmp_path, table).spec.warnings == ()
    assert "looks like an id" in load(tmp_path, table, key_columns=()).spec.warnings[0]


def test_a_column_may_have_more_texts_than_could_be_one_hot(tmp_path: Path) -> None:
    table = "id,label\n" + "".join(f"u{n},{'pq'[n % 2]}\n" for n in range(5000))
    assert len(np.unique(inputs_of(load(tmp_path, table))["keys"])) == 5000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key_columns": ("label",)}, "data.key_columns names the label 'label'"),
        (
            {"key_columns": ("city",), "ignore": ("city",)},
            "data.key_columns names 'city', which data.ignore leaves out",
        ),
        ({"key_columns": ("town",)}, "has no column 'town', which data.key_columns names; its columns: age, city"),
        ({"key_columns": ("*", "city")}, "has no column '\\*', which data.key_columns names"),
    ],
)
def test_wrong_names_are_reported(tmp_path: Path, options: Any, said: str) -> None:
    with pytest.raises(BadData, match=rf"train\.csv: {said}"):
        load(tmp_path, **options)


def test_the_fingerprint_is_that_of_numbers_and_keys(tmp_path: Path) -> None:
    prints = [load(tmp_path, TABLE.replace("Bonn", city)).spec.fingerprint for city in ("Bonn", "Bonn", "Rom")]
    assert prints[0] == prints[1] != prints[2]
    assert prints[0] != load(tmp_path, key_columns=()).spec.fingerprint


# --- afterwards ---


def test_rows_have_afterwards_the_keys_that_they_had_in_training(tmp_path: Path) -> None:
    source = load(tmp_path, categorical=("zip",))
    assert source.spec.preprocessing is not None
    (tmp_path / "p.json").write_bytes(as_json(source.spec.preprocessing))
    read = read_preprocessing(tmp_path / "p.json")
    assert read == source.spec.preprocessing
    names = TABLE.splitlines()[0].split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in TABLE.splitlines()[1:]]
    found, due = read.inputs(rows), inputs_of(source)
    assert found.keys() == due.keys()
    for name, values in due.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)
    as_values: list[Any] = [{"age": 20, "city": "Bonn", "home": None, "zip": 7}]
    assert read.inputs(as_values)["keys"].tolist() == [[key("city", "Bonn"), key("home", ""), key("zip", "7")]]
    assert [str(field) for field in read.fields()] == [str(field) for field in source.spec.fields[:2]]


def test_without_keys_there_is_one_array_of_inputs(tmp_path: Path) -> None:
    source = load(tmp_path, key_columns=())
    assert source.spec.preprocessing is not None
    assert (source.spec.preprocessing.fields(), source.spec.fields) == ((), ())
    with pytest.raises(BadData, match="row 1 has no column 'city'"):
        source.spec.preprocessing.inputs([{"age": 1}])


# --- of Parquet ---


def test_parquet_has_the_keys_of_the_same_table_in_text(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"n": [1.5, None, 3.0], "code": [7, 5, 7], "city": ["Bonn", None, "Köln"], "label": ["p", "q", "p"]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    options = ParquetOptions(path=tmp_path / "a.parquet", label="label", held_out=0.0, key_columns=("city", "code"))
    found = open_parquet(options)
    due = load(
        tmp_path, "n,code,city,label\n1.5,7,Bonn,p\n,5,,q\n3,7,Köln,p\n", missing="", key_columns=("city", "code")
    )
    assert found.spec == due.spec
    assert inputs_of(found)["keys"][0].tolist() == [key("code", "7"), key("city", "Bonn")]
    starred = open_parquet(options.replaced(key_columns=("*",), categorical=("code",)))
    assert starred.spec == found.spec


def test_parquet_s_whole_numbers_are_keys_to_the_last_digit(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ids = [2**60 + 1, 2**60, None]
    due = [key("id", text) for text in (str(ids[0]), str(ids[1]), "")]
    for array in (pa.array(ids, pa.uint64()), pa.array(ids).dictionary_encode()):
        parquet.write_table(pa.table({"id": array, "label": ["p", "q", "p"]}), tmp_path / "a.parquet")
        options = ParquetOptions(path=tmp_path / "a.parquet", label="label", held_out=0.0, key_columns=("id",))
        found = open_parquet(options)
        assert inputs_of(found)["keys"][:, 0].tolist() == due
        assert found.spec.preprocessing is not None
        rows = [{"id": one} for one in (*ids[:2], None, np.uint64(ids[0]))]
        assert found.spec.preprocessing.inputs(rows)["keys"][:, 0].tolist() == [*due, due[0]]


# --- the folder of a table ---


def test_file_and_held_out_file_are_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,label\n1,p\n3,q\n")
    (tmp_path / "b.csv").write_text("a,label\n5,q\n")
    options = CsvOptions(path=tmp_path, label="label", file="a.csv", held_out_file="b.csv")
    assert (options.table, options.held_out_table) == (tmp_path / "a.csv", tmp_path / "b.csv")
    source = open_csv(options)
    assert (source.spec.examples, source.spec.held_out) == (2, 1)
    assert source.held_out(0, 1)[0].tolist() == [[3]]
    with pytest.raises(BadData, match=r"c\.csv: cannot be read: No such file"):
        open_csv(options.replaced(held_out_file="c.csv"))


def test_without_file_the_path_is_the_table(tmp_path: Path) -> None:
    options = CsvOptions(path=tmp_path / "a.csv", label="label", held_out_path=tmp_path / "b.csv")
    assert (options.table, options.held_out_table) == (tmp_path / "a.csv", tmp_path / "b.csv")
    beside = CsvOptions(path=tmp_path, file="a.csv", label="label", held_out_path=tmp_path / "b.csv")
    assert (beside.table, beside.held_out_table) == (tmp_path / "a.csv", tmp_path / "b.csv")
    assert CsvOptions(path=tmp_path / "a.csv", label="label").held_out_table is None


@pytest.mark.parametrize(
    "wrong", [{"held_out_file": "b.csv"}, {"file": "a", "held_out_file": "b", "held_out_path": "c"}]
)
def test_a_held_out_table_that_is_named_twice_or_in_no_folder_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="held_out_file is in the folder of file, in place of held_out_path"):
        validated(CsvOptions, {"path": "/x", "label": "label", **wrong})
