"""Parquet tables: Arrow's types, the same encoding as text tables, and damage that is named."""

import datetime
import decimal
import json
import re
import sys

import numpy as np
import pytest

from parashard.data.table_files import CsvOptions, ParquetOptions, open_csv, open_parquet
from parashard.errors import BadData, ConfigurationError
from parashard.process.extras import install

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(path, **columns):
    parquet.write_table(pa.table(columns), path)
    return path


def load(tmp_path, **columns):
    return open_parquet(ParquetOptions(path=write(tmp_path / "a.parquet", **columns), label="label", held_out=0.0))


def inputs_of(source):
    return source.examples(np.arange(source.spec.examples))[0].tolist()


def test_is_encoded_like_the_same_table_in_text(tmp_path):
    write(tmp_path / "a.parquet", size=[1.0, 2.0, None, 6.0], colour=["red", None, "blue", "red"], label=list("yxyx"))
    (tmp_path / "a.csv").write_text("size,colour,label\n1,red,y\n2,,x\n,blue,y\n6,red,x\n")
    from_parquet = open_parquet(ParquetOptions(path=tmp_path / "a.parquet", label="label"))
    from_text = open_csv(CsvOptions(path=tmp_path / "a.csv", label="label"))
    assert from_parquet.spec == from_text.spec


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 3], pa.int8()),
        pa.array([2**60, 3 * 2**60], pa.uint64()),
        pa.array(np.array([1, 3], np.float16)),
        pa.array([False, True]),
        pa.array([decimal.Decimal("1.5"), decimal.Decimal("2.5")]),
        pa.array([1, 3]).dictionary_encode(),
        pa.chunked_array([[1], [3]]),
    ],
)
def test_numbers_of_every_type_are_standardised(tmp_path, column):
    assert inputs_of(load(tmp_path, a=column, label=["x", "y"])) == [[-1], [1]]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["q", None, "p"]),
        pa.array(["q", None, "p"], pa.large_string()),
        pa.array(["q", None, "p"]).dictionary_encode(),
        pa.chunked_array([["q", None], ["p"]]),
    ],
)
def test_text_of_every_type_is_one_hot(tmp_path, column):
    assert inputs_of(load(tmp_path, a=column, label=["x", "y", "y"])) == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_codes_can_be_declared_categorical_and_a_held_out_table_follows(tmp_path):
    training = write(tmp_path / "a.parquet", code=[7, 5, 7], label=[1.5, 10.0, 9.0])
    held_out = write(tmp_path / "b.parquet", code=[5, 6], label=[9.0, 10.0])
    options = ParquetOptions(
        path=training, label="label", held_out_path=held_out, categorical=("code",), target="class"
    )
    source = open_parquet(options)
    assert inputs_of(source) == [[0, 1], [1, 0], [0, 1]]
    assert source.examples(np.arange(3))[1].tolist() == [0, 2, 1]
    inputs, targets = source.held_out(0, 2)
    assert inputs.tolist() == [[1, 0], [0, 0]]
    assert targets.tolist() == [1, 2]


LONG = [1234567890123456789, 1234567890123456790, None]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(LONG),
        pa.array(LONG).dictionary_encode(),
        pa.array(map(decimal.Decimal, LONG[:2]), pa.decimal128(38, 0)),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{"key_columns": ("a",)}, {"key_columns": ("*",), "categorical": ("a",)}, {"categorical": ("a",)}],
)
def test_long_whole_numbers_keep_their_digits_as_texts_and_are_refused_as_numbers(tmp_path, column, options):
    path = write(tmp_path / "a.parquet", a=column, b=[0.5, 1.5, 2.5][: len(column)], label=list("xyx")[: len(column)])
    source = open_parquet(ParquetOptions(path=path, label="label", held_out=0.0, **options))
    inputs, _ = source.examples(np.arange(len(column)))
    values = inputs["keys"] if isinstance(inputs, dict) else inputs[:, : len(column)]
    assert len({tuple(row) for row in values.tolist()}) == len(column)
    for label in ("label", "a"):
        with pytest.raises(BadData, match=r"column 'a': found 12345678901234567\d\d, which as a number would lose"):
            open_parquet(ParquetOptions(path=path, label=label))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"a": [], "label": []}, "has no rows"),
        (
            {"a": [datetime.date(2020, 1, 1)], "label": ["x"]},
            "column 'a': holds dates or times .date32.*by data.ignore",
        ),
        (
            {"a": [[1]], "label": ["x"]},
            "column 'a': has lists; data.list_columns = ..a.. makes keys of them, data.ignore",
        ),
        ({"a": [[[1]]], "label": ["x"]}, "column 'a': must hold lists of numbers, .*list<"),
        ({"a": [1], "label": [["x"]]}, "column 'label': has lists; a label is one value in each row"),
        ({"a": [1.0, float("inf")], "label": ["x", "y"]}, "column 'a': row 2 is infinite"),
        ({"a": [1, 2], "label": ["x", None]}, "label column 'label': must have 2"),
        ({"a": [1, 2, 3], "label": ["x", None, "y"]}, "column 'label', row 2: the label is missing"),
        ({"a": [1, 2]}, "has no column 'label'"),
        ({"a": [1, 2], "label": pa.nulls(2)}, "label column 'label': must have 2"),
    ],
)
def test_a_wrong_table_is_reported(tmp_path, columns, said):
    with pytest.raises(BadData, match=rf"a\.parquet.*{said}"):
        load(tmp_path, **columns)


@pytest.mark.parametrize("options", [{"key_columns": ("a",)}, {"categorical": ("a",)}, {"list_columns": ("a",)}])
def test_ids_that_are_floats_already_are_refused_as_keys(tmp_path, options):
    long = 1234567890123456789.0
    values = [[long], [1.0]] if "list_columns" in options else [long, None]
    path = write(tmp_path / "a.parquet", a=values, b=[0.5, 1.5], label=["x", "y"])
    with pytest.raises(
        BadData, match=r"'a': found the float 1234567890123456768, which has lost its last digits, as a"
    ):
        open_parquet(ParquetOptions(path=path, label="label", held_out=0.0, **options))
    if "categorical" in options:
        fitted = load(tmp_path, a=["1", "2"], b=["u", "v"], label=["x", "y"]).spec.preprocessing
        with pytest.raises(BadData, match=r"column 'b', row 1: found the float 1234567890123456768, which has lost"):
            fitted.inputs([{"a": 1, "b": long}])


def test_a_named_index_of_pandas_is_told_of(tmp_path):
    columns = pa.table({"old": [7, 3], "a": [1.5, 2.5], "label": ["x", "y"]})
    described = {"index_columns": ["old", {"kind": "range"}]}
    parquet.write_table(columns.replace_schema_metadata({"pandas": json.dumps(described)}), tmp_path / "a.parquet")
    options = ParquetOptions(path=tmp_path / "a.parquet", label="label", held_out=0.0)
    assert [text.partition(";")[0] for text in open_parquet(options).spec.warnings] == [
        "column 'old' is an index of pandas, and is learned from: its order may tell the label"
    ]
    assert open_parquet(options.replaced(ignore=("old",))).spec.warnings == ()


def test_an_index_of_times_without_a_name_is_left_out(tmp_path):
    day = [datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)]
    assert inputs_of(load(tmp_path, a=[1, 3], label=["x", "y"], __index_level_0__=day)) == [[-1], [1]]


def test_a_boolean_can_be_predicted_for_as_text_and_as_it_is(tmp_path):
    source = load(tmp_path, m=[True, False, True], x=[0.5, 1.5, 2.5], label=["x", "y", "x"])
    fitted = source.spec.preprocessing
    for yes, no in (("True", "False"), ("TRUE", " false"), (True, np.False_), (1, 0), ("1", "0.0")):
        assert fitted.inputs([{"m": yes, "x": 0.5}, {"m": no, "x": 1.5}]).tolist() == inputs_of(source)[:2]
    with pytest.raises(BadData, match=r"column 'm', row 1: found 'yes'; allowed: true, false, a number, or an empty"):
        fitted.inputs([{"m": "yes", "x": 0.5}])
    with pytest.raises(BadData, match=r"column 'x', row 1: found 'True'; allowed: a number, or an empty cell"):
        fitted.inputs([{"m": 1, "x": "True"}])
    assert fitted.inputs([{"m": 1, "x": True}]).tolist() == fitted.inputs([{"m": 1, "x": 1}]).tolist()


@pytest.mark.parametrize("values", [[7, 10, 7], [0.5, 1.5, 0.5]])
def test_a_category_of_pandas_is_names_also_where_they_are_numbers(tmp_path, values):
    table = pa.table({"a": pa.array(values).dictionary_encode(), "b": [1, 2, 3], "label": ["x", "y", "x"]})
    described = {"columns": [{"field_name": "a", "pandas_type": "categorical"}, {"field_name": None}]}
    parquet.write_table(table.replace_schema_metadata({"pandas": json.dumps(described)}), tmp_path / "a.parquet")
    source = open_parquet(ParquetOptions(path=tmp_path / "a.parquet", label="label", held_out=0.0))
    first = 1 if values == [7, 10, 7] else 0
    assert [row[first] for row in inputs_of(source)] == [1, 0, 1]
    assert source.spec.input_shape == (3,)


UNREADABLE = {"date": [datetime.date(2020, 1, 1)] * 2, "list": [[1], [2]], "infinite": [1.0, float("inf")]}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_column_that_is_left_out_may_hold_anything(tmp_path, name):
    training = write(tmp_path / "a.parquet", a=[1, 3], b=UNREADABLE[name], label=["x", "y"])
    held_out = write(tmp_path / "b.parquet", a=[1, 3], b=UNREADABLE[name], label=["x", "y"])
    options = ParquetOptions(path=training, label="label", held_out_path=held_out, ignore=("b",))
    assert inputs_of(open_parquet(options)) == [[-1], [1]]


def test_a_held_out_table_may_have_more_columns_of_any_type(tmp_path):
    training = write(tmp_path / "a.parquet", a=[1, 3], label=["x", "y"])
    held_out = write(tmp_path / "b.parquet", a=[1, 3], b=UNREADABLE["date"], label=["x", "y"])
    open_parquet(ParquetOptions(path=training, label="label", held_out_path=held_out))


def test_a_column_without_any_value_is_warned_of_as_in_text(tmp_path):
    source = load(tmp_path, a=[1, 3], b=pa.nulls(2), label=["x", "y"])
    (tmp_path / "a.csv").write_text("a,b,label\n1,,x\n3,,y\n")
    from_text = open_csv(CsvOptions(path=tmp_path / "a.csv", label="label", held_out=0.0))
    assert source.spec == from_text.spec
    assert "column 'b' has no value in any row" in source.spec.warnings[0]


def test_a_held_out_column_of_another_kind_is_reported(tmp_path):
    training = write(tmp_path / "a.parquet", a=[7, 5], label=["x", "y"])
    held_out = write(tmp_path / "b.parquet", a=["7", "big"], label=["x", "y"])
    with pytest.raises(
        BadData, match=r"b\.parquet: column 'a', row 2: found 'big', where the training table has finite"
    ):
        open_parquet(ParquetOptions(path=training, label="label", held_out_path=held_out))


def test_columns_of_one_name_are_refused(tmp_path):
    parquet.write_table(pa.Table.from_arrays([pa.array([1])] * 2, names=["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(BadData, match=r"a\.parquet: column names must differ"):
        open_parquet(ParquetOptions(path=tmp_path / "a.parquet", label="a"))


@pytest.mark.parametrize("damage", [lambda c: b"", lambda c: b"PAR1", lambda c: c[:-20], lambda c: c[:-30] + bytes(30)])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = write(tmp_path / "a.parquet", a=[7, 5], label=["x", "y"])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadData, match=r"a\.parquet: cannot be read as Parquet"):
        open_parquet(ParquetOptions(path=path, label="label"))


def test_text_that_is_not_utf_8_is_bad_data(tmp_path):
    mangled = pa.array([b"caf\xe9", b"tea"]).view(pa.string())
    with pytest.raises(BadData, match=r"a\.parquet: "):
        load(tmp_path, a=mangled, label=["x", "y"])


def test_row_groups_are_joined(tmp_path):
    parquet.write_table(pa.table({"a": [1, 3], "label": ["x", "y"]}), tmp_path / "a.parquet", row_group_size=1)
    source = open_parquet(ParquetOptions(path=tmp_path / "a.parquet", label="label", held_out=0.0))
    assert inputs_of(source) == [[-1], [1]]


@pytest.mark.parametrize("name", ["nowhere.parquet", "."])
def test_a_missing_file_and_a_folder_are_named(tmp_path, name):
    with pytest.raises(BadData, match="cannot be read as Parquet"):
        open_parquet(ParquetOptions(path=tmp_path / name, label="label"))


def test_names_the_extra_where_pyarrow_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=re.escape(install("parquet"))):
        open_parquet(ParquetOptions(path=tmp_path / "a.parquet", label="label"))
