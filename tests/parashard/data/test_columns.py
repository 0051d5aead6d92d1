"""Which columns are numeric, which cells are missing, and what is refused or warned of: the same in every format."""

import numpy as np
import pytest

from parashard.data.table_files import CsvOptions, open_csv
from parashard.errors import BadData


def from_csv(tmp_path, columns, **options):
    path = tmp_path / "a.csv"
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join([",".join(columns), *(",".join("" if c is None else c for c in row) for row in rows)]))
    return open_csv(CsvOptions(path=path, label="label", held_out=0.0, **options))


def from_parquet(tmp_path, columns, **options):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from parashard.data.table_files import ParquetOptions, open_parquet

    parquet.write_table(
        pa.table({name: pa.array(cells, pa.string()) for name, cells in columns.items()}), tmp_path / "a"
    )
    return open_parquet(ParquetOptions(path=tmp_path / "a", label="label", held_out=0.0, **options))


both = pytest.mark.parametrize("opened", [from_csv, from_parquet])


def inputs_of(source):
    return source.examples(np.arange(source.spec.examples))[0].tolist()


@both
@pytest.mark.parametrize("cell", ["", "NA", "na", "N/A", "nan", "NaN", " null ", None])
def test_a_missing_cell_leaves_a_column_numeric(tmp_path, opened, cell):
    source = opened(tmp_path, {"a": ["1", cell, "3"], "label": ["x", "y", "x"]})
    assert inputs_of(source) == [[-1, 0], [0, 1], [1, 0]]


@both
def test_another_text_for_a_missing_value_is_reported(tmp_path, opened):
    columns = {"a": ["1", "-", "3", "NA"], "label": ["x", "y", "x", "y"]}
    assert inputs_of(opened(tmp_path, columns, missing="-")) == [[-1, 0], [0, 1], [1, 0], [0, 1]]


@both
@pytest.mark.parametrize("cell", ["hello", "1,5", "5 kg", "inf", "1e999", "1_000"])
def test_one_text_in_a_numeric_column_is_an_error_that_names_the_cell(tmp_path, opened, cell):
    cells = [str(i) for i in range(10)]
    cells[6] = f'"{cell}"' if opened is from_csv else cell
    with pytest.raises(BadData) as refused:
        opened(tmp_path, {"size": cells, "label": ["x", "y"] * 5})
    line = " (line 8)" if opened is from_csv else ""
    assert f"column 'size', row 7{line}: found '{cell}'; 9 of the 10 values in this column are finite" in str(
        refused.value
    )
    assert f'data.missing = "{cell}"' in str(refused.value)
    assert 'data.categorical = ["size"]' in str(refused.value)


@both
def test_cells_and_names_of_any_length_leave_room_for_their_place(tmp_path, opened):
    long = "x" * 5000
    with pytest.raises(BadData, match=r"column 'size', row 7.*found 'xxx") as refused:
        opened(tmp_path, {"size": [*"123456", long, *"890"], "label": ["x", "y"] * 5})
    assert len(str(refused.value)) < 400 + len(str(tmp_path))
    assert "data.missing" not in str(refused.value), "such a long text does not stand for a missing value"
    with pytest.raises(BadData, match=r"has no column 'b', which data.ignore names; its columns: a, xxx") as refused:
        opened(tmp_path, {"a": ["1", "2"], long: ["1", "2"], "label": ["x", "y"]}, ignore=("b",))
    assert len(str(refused.value)) < 400 + len(str(tmp_path))
    many = {f"column {i}": ["1", "2"] for i in range(1000)}
    with pytest.raises(BadData, match=r"its columns: column 0, column 1, .*, and 981 more") as refused:
        opened(tmp_path, {**many, "label": ["x", "y"]}, ignore=("b",))
    assert len(str(refused.value)) < 400 + len(str(tmp_path))


@both
@pytest.mark.parametrize(
    "cells",
    [
        [f"{i}%" for i in range(30)],
        [f"{i},5" for i in range(30)],
        [f"{i},000" for i in range(30)],
        [f"2024-01-{i:02}" for i in range(1, 31)],
        [f"${i}.50" for i in range(30)],
        [f"{i} kg" for i in range(30)],
        [f"2024-01-02T10:00:{i:02}Z" for i in range(30)],
    ],
    ids=["percent", "comma", "thousands", "date", "money", "unit", "time"],
)
def test_numbers_in_another_notation_are_warned_of(tmp_path, opened, cells):
    quoted = [f'"{cell}"' for cell in cells] if opened is from_csv else cells
    columns = {"a": quoted * 2, "label": ["x", "y"] * 30}
    (told,) = opened(tmp_path, columns).spec.warnings
    assert told.startswith(f"column 'a' has 30 distinct texts that look like numbers or dates, such as {cells[0]!r}")
    assert 'data.ignore = ["a"] leaves it out' in told
    assert opened(tmp_path, columns, categorical=("a",)).spec.warnings == ()


@both
@pytest.mark.parametrize(
    "cells",
    [
        ["1st", "2nd", "3rd"] * 10,
        [f"2{i:03x}f8d1e-{i:03x}" for i in range(20)] * 3,
        [f"red {i}" for i in range(20)] * 3,
    ],
    ids=["few", "codes", "names"],
)
def test_names_with_digits_are_not_warned_of(tmp_path, opened, cells):
    assert opened(tmp_path, {"a": cells, "label": ["x", "y"] * (len(cells) // 2)}).spec.warnings == ()


@both
@pytest.mark.parametrize(("cell", "shown"), [("5", "5"), ("red", "'red'")])
def test_a_column_of_one_value_is_warned_of(tmp_path, opened, cell, shown):
    columns = {"a": [cell] * 30, "b": ["1", "2", "4"] * 10, "label": ["x", "y"] * 15}
    (told,) = opened(tmp_path, columns).spec.warnings
    assert told.startswith(f"column 'a' is {shown} in every row, from which nothing can be learned")
    columns["a"] = [cell, ""] * 15
    assert opened(tmp_path, columns).spec.warnings == (), "whether it is missing can be learned from"


@both
def test_a_word_that_fills_most_of_a_numeric_column_does_not_make_it_text(tmp_path, opened):
    cells = ["1", "2", "3", "unknown", "unknown", "unknown", "unknown", "unknown"]
    with pytest.raises(BadData, match=r"row 4.*: found 'unknown', as have 4 more rows; 3 of the 8 values"):
        opened(tmp_path, {"a": cells, "label": ["x", "y"] * 4})
    source = opened(tmp_path, {"a": cells, "label": ["x", "y"] * 4}, missing="unknown")
    assert source.spec.input_shape == (2,)


@both
def test_names_of_which_few_are_numbers_are_text(tmp_path, opened):
    source = opened(tmp_path, {"a": ["A1", "7", "B2", "A1"], "label": ["x", "y", "x", "y"]})
    assert source.spec.preprocessing.columns[0].categories == ("7", "A1", "B2")


@both
def test_a_mixed_column_is_text_if_configured(tmp_path, opened):
    source = opened(tmp_path, {"a": ["1", "2", "10+", "1"], "label": ["x", "y", "x", "y"]}, categorical=("a",))
    assert source.spec.preprocessing.columns[0].categories == ("1", "10+", "2")


@both
def test_ids_are_warned_of_and_can_be_left_out(tmp_path, opened):
    columns = {
        "id": [f"u{i:04}" for i in range(30)],
        "index": [str(i) for i in range(30)],
        "empty": ["NA"] * 30,
        "colour": ["red", "blue", "green"] * 10,
        "size": [str(i * i) for i in range(30)],
        "label": ["x", "y"] * 15,
    }
    told = opened(tmp_path, columns).spec.warnings
    assert [text.split(", from which")[0] for text in told] == [
        "column 'id' has 30 distinct texts in 30 rows: it looks like an id",
        "column 'index' counts the rows from 0 to 29: it looks like an index",
        "column 'empty' has no value in any row",
    ]
    assert told[0].endswith('data.ignore = ["id"] leaves it out')
    spec = opened(tmp_path, columns, ignore=("id", "index", "empty")).spec
    assert (spec.warnings, spec.input_shape) == ((), (4,))


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "__index_level_0__"])
@both
def test_an_index_of_pandas_is_no_input_unless_a_key_names_it(tmp_path, opened, name):
    columns = {name: ["7", "3", "9"], "a": ["0.5", "1.5", "2.5"], "label": ["x", "y", "x"]}
    spec = opened(tmp_path, columns).spec
    assert spec.input_shape == (1,)
    assert spec.warnings == (
        f"column '{name}' is an index of pandas, and is left out, as by data.ignore = [\"{name}\"]; "
        f'data.categorical = ["{name}"] uses it',
    )
    assert opened(tmp_path, columns, ignore=(name,)).spec.warnings == ()
    assert opened(tmp_path, columns, categorical=(name,)).spec.input_shape == (4,)
    assert len(opened(tmp_path, columns, key_columns=(name,)).spec.fields) == 3


@both
def test_whole_numbers_that_all_differ_are_warned_of(tmp_path, opened):
    order = np.random.default_rng(0).permutation(200)[:180]
    columns = {
        "old": [str(n) for n in order],
        "user": [str(10**9 + n * 7_654_321 % 10**9) for n in order],
        "twice": [str(n // 2) for n in order],
        "label": ["x", "y"] * 90,
    }
    assert [text.partition(",")[0] for text in opened(tmp_path, columns).spec.warnings] == [
        "column 'old' has a different whole number in each of 180 rows",
        "column 'user' has a different whole number in each row: if it is an id",
    ]


@both
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ignore": ("b",)}, "has no column 'b', which data.ignore names"),
        ({"ignore": ("label",)}, "data.ignore names the label 'label'"),
        ({"ignore": ("a",)}, "has no column but the label 'label' to learn from"),
    ],
)
def test_what_cannot_be_ignored_is_reported(tmp_path, opened, options, said):
    with pytest.raises(BadData, match=said):
        opened(tmp_path, {"a": ["1", "2"], "label": ["x", "y"]}, **options)


def test_lines_are_those_of_the_file(tmp_path):
    text = '# made today\na,b,label\n\n1,"two\nlines",x\n2,c,y\n3,c,x\n# here\nhello,c,y\n'
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(BadData, match=r"column 'a', row 4 \(line 9\): found 'hello'"):
        open_csv(CsvOptions(path=tmp_path / "a.csv", label="label", comment="#"))


@both
def test_every_source_says_in_one_line_what_it_has(tmp_path, opened):
    columns = {"a": ["1", "2.5", "4"] * 4, "colour": ["red", "blue", "red"] * 4, "label": ["no", "yes", "no"] * 4}
    assert opened(tmp_path, columns).spec.summary() == (
        "12 training rows, 0 held out; 1 numeric and 1 text columns as 3 inputs; 2 classes of label (no, yes)"
    )
    columns["label"] = ["0.5", "1.5", "0.5"] * 4
    assert (
        opened(tmp_path, columns)
        .spec.summary()
        .endswith("as 3 inputs; values of label (mean 0.8333, standard deviation 0.4714)")
    )
