"""Text tables: kinds of columns, encodings, and every kind of damage is BadData that names the file."""

import gzip

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from parashard.data.table_files import CsvOptions, open_csv, read_csv
from parashard.errors import BadData
from parashard.frozen_model import validated

TRAINING = """size,colour,label
1,red,yes
2,blue,no
3,?,yes
6,red,no
"""


def load(tmp_path, training=TRAINING, held_out=None, **options):
    (tmp_path / "train.csv").write_text(training)
    if held_out is not None:
        (tmp_path / "test.csv").write_text(held_out)
        options["held_out_path"] = tmp_path / "test.csv"
    options = {"label": "label", "missing": "?", "held_out": 0.0} | options
    return open_csv(CsvOptions(path=tmp_path / "train.csv", **options))


def everything(source):
    inputs, targets = source.examples(np.arange(source.spec.examples))
    return inputs.tolist(), targets.tolist()


def test_encodes_numbers_and_words(tmp_path):
    inputs, targets = everything(load(tmp_path))
    deviation = np.std([1, 2, 3, 6])
    sizes = [np.float32((size - 3) / deviation) for size in (1, 2, 3, 6)]
    assert inputs == [  # size, blue, red, missing
        [sizes[0], 0, 1, 0],
        [sizes[1], 1, 0, 0],
        [sizes[2], 0, 0, 1],
        [sizes[3], 0, 1, 0],
    ]
    assert targets == [1, 0, 1, 0]  # no, yes


def test_a_held_out_table_is_encoded_with_what_training_taught(tmp_path):
    source = load(tmp_path, held_out="label,size,extra,colour\nno,3,x,green\nyes,?,x,red\nno,6,x,?\n")
    assert (source.spec.examples, source.spec.held_out, source.spec.classes) == (4, 3, 2)
    inputs, targets = source.held_out(0, 3)
    six = np.float32(3 / np.std([1, 2, 3, 6]))
    assert inputs.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0], [six, 0, 0, 1]]
    assert targets.tolist() == [0, 1, 0]


def test_a_number_that_is_missing_becomes_the_mean_and_a_flag(tmp_path):
    inputs, _ = everything(load(tmp_path, "a,label\n1,x\n?,y\n3,x\n"))
    assert inputs == [[-1, 0], [0, 1], [1, 0]]


def test_a_constant_column_becomes_zero(tmp_path):
    assert everything(load(tmp_path, "a,label\n5,x\n5,y\n"))[0] == [[0], [0]]


def test_reads_the_format_of_uci(tmp_path):
    columns = ("age", "work", "label")
    source = load(
        tmp_path,
        "39, State-gov, <=50K\n50, ?, >50K\n\n",
        "|1x3 Cross validator\n39, State-gov, <=50K.\n44, ?, >50K.\n",
        columns=columns,
        separator=", ",
        strip_label=".",
        comment="|",
    )
    assert everything(source) == ([[-1, 1, 0], [1, 0, 1]], [0, 1])
    assert source.held_out(0, 2)[1].tolist() == [0, 1]


@pytest.mark.parametrize(("labels", "classes"), [("10 9 9 10", [1, 0, 0, 1]), ("b a a b", [1, 0, 0, 1])])
def test_classes_are_the_sorted_labels_numbers_by_value(tmp_path, labels, classes):
    rows = "".join(f"{i},{label}\n" for i, label in enumerate(labels.split()))
    assert everything(load(tmp_path, "a,label\n" + rows))[1] == classes


def texts_of(path, content, **options):
    path.write_bytes(content)
    table = read_csv(path, CsvOptions(path=path, label="y", **options))
    columns = {name: [column.vocabulary[code] for code in column.codes] for name, column in table.columns.items()}
    return columns, table


def test_lines_of_a_quoted_cell_are_no_comments(tmp_path):
    content = b'# made today\nx,note,y\n1,"to do:\n# one\n# two\nend",0\n# between\n2,"a\n#b",1\n'
    columns, table = texts_of(tmp_path / "a.csv", content, comment="#")
    assert columns == {"x": ["1", "2"], "note": ["to do:\n# one\n# two\nend", "a\n#b"], "y": ["0", "1"]}
    assert table.lines == [6, 9]


TITLES = b'x\ttitle\ty\n1\tplain\t0\n2\t"open\t1\n3\tplain\t0\n4\tmore"\t1\n5\tend\t0\n'


def test_quotes_that_join_lines_and_do_nothing_else_are_warned_of(tmp_path):
    columns, table = texts_of(tmp_path / "a.tsv", TITLES, separator="\t")
    assert len(columns["x"]) == 3
    assert table.warnings == (
        "lines 3 to 5 are one row, as quotes join them, and only such rows have quotes; if quotes are letters like "
        'others, say data.quote = ""',
    )
    columns, table = texts_of(tmp_path / "a.tsv", TITLES, separator="\t", quote="")
    assert (columns["title"], table.warnings) == (["plain", '"open', "plain", 'more"', "end"], ())
    assert texts_of(tmp_path / "b.csv", b'x,y\n"1\n2",0\n"3",1\n')[1].warnings == ()


def test_warnings_of_reading_are_warnings_of_the_data(tmp_path):
    content = "x\ty\n" + '1\t0\n"2\n"\t1\n' * 2
    assert "lines 3 to 4 are one row" in load(tmp_path, content, label="y", separator="\t").spec.warnings[0]


def test_a_quote_in_a_cell_is_refused_with_the_key(tmp_path):
    content = 'x\ttitle\ty\n1\tplain\t0\n2\t"Heroes" of the night\t1\n'
    with pytest.raises(
        BadData, match=r"row 2 \(line 3\) cannot be parsed.*letters like others here, say data.quote = .."
    ):
        load(tmp_path, content, label="y", separator="\t")
    assert load(tmp_path, content, label="y", separator="\t", quote="").spec.examples == 2
    assert texts_of(tmp_path / "a.csv", b"x,y\n'a,b',1\n", quote="'")[0]["x"] == ["a,b"]


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ('x::t::y\n1::Caf\xe9, "La"::0\n2::b:::1\n'.encode("latin-1"), {"separator": "::", "encoding": "latin-1"}),
        ('x | t | y\n1 | Caf\xe9, "La" | 0\n2 | b: | 1\n'.encode("utf-16"), {"separator": " | ", "encoding": "utf-16"}),
    ],
)
def test_long_separators_and_other_encodings_are_read(tmp_path, content, options):
    due = {"x": ["1", "2"], "t": ['Caf\xe9, "La"', "b:" if "|" in options["separator"] else "b"], "y": ["0", "1"]}
    if "|" not in options["separator"]:
        due["y"][1] = ":1"  # the first separator of ":::" ends the cell
    assert texts_of(tmp_path / "a.txt", content, **options)[0] == due


def test_another_encoding_is_named_where_text_is_no_utf_8(tmp_path):
    with pytest.raises(BadData, match=r"is not text in UTF-8: .*names another, such as .latin-1"):
        texts_of(tmp_path / "a.csv", "x,y\nCaf\xe9,1\n".encode("latin-1"))


def test_a_file_may_be_compressed(tmp_path):
    zipped = gzip.compress(b"x,y\n1,a\n2,b\n")
    assert texts_of(tmp_path / "a.csv.gz", zipped)[0] == {"x": ["1", "2"], "y": ["a", "b"]}
    for damaged in (zipped[:-9], zipped[:12] + b"\xff" + zipped[13:]):
        with pytest.raises(BadData, match=r"a\.csv\.gz: the gzip stream is damaged"):
            texts_of(tmp_path / "a.csv.gz", damaged)


def test_cells_may_be_long(tmp_path):
    assert load(tmp_path, f"a,note,label\n1,{'n' * 200_000},x\n2,b,y\n", ignore=("note",)).spec.examples == 2


def test_a_parquet_file_is_named_as_what_it_is(tmp_path):
    with pytest.raises(BadData, match=r"is a Parquet file, and due is a text table; data.source = .parquet. reads it"):
        texts_of(tmp_path / "a.csv", b"PAR1\0\xff\0PAR1")


def test_codes_can_be_declared_categorical(tmp_path):
    source = load(tmp_path, "zip,label\n1,x\n2,y\n1,x\n", "zip,label\n1,x\nnone,y\n", categorical=("zip",))
    assert everything(source)[0] == [[1, 0], [0, 1], [1, 0]]
    assert source.held_out(0, 2)[0].tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize("label", ["label", "a"])
def test_a_long_whole_number_is_refused_as_a_number(tmp_path, label):
    table = "a,label\n1,1.5\n1234567890123456789,2.5\n"
    with pytest.raises(BadData, match=r"'a', row 2 \(line 3\): found 1234567890123456789, which as a number would"):
        load(tmp_path, table, label=label)
    assert load(tmp_path, table, categorical=("a",)).spec.input_shape == (2,)


def test_a_fraction_is_held_out_and_teaches_nothing(tmp_path):
    table = "a,b,label\n" + "".join(f"{i},w{i},{i % 3}\n" for i in range(50))
    (tmp_path / "train.csv").write_text(table)
    source = open_csv(CsvOptions(path=tmp_path / "train.csv", label="label", held_out=0.2))
    assert (source.spec.examples, source.spec.held_out, source.spec.input_shape) == (40, 10, (41,))
    assert abs(source.examples(np.arange(40))[0][:, 0].mean()) < 1e-6
    assert source.held_out(0, 10)[0][:, 1:].sum() == 0  # their words are unknown


def test_the_fingerprint_is_pinned(tmp_path):
    """It must not depend on the machine: sums run in a fixed order."""
    table = "a,b,label\n" + "".join(f"{i * 0.37},w{i % 7},{i % 3}\n" for i in range(200))
    assert load(tmp_path, table).spec.fingerprint == "ed83b251d56fef0304a0f383ebe7a89b1640272afa0be20cb8a611bc2d3d69db"


@pytest.mark.parametrize(
    ("training", "options", "said"),
    [
        ("", {}, "has no rows"),
        ("a,label\n", {}, "has no rows"),
        ("a,label\n1,x\n1,2,y\n", {}, r"row 2 \(line 3\) has 3 values where the 2 columns a, label are due"),
        ("a,label\n1\n", {}, r"row 1 \(line 2\) has 1 values"),
        ("a,label,a\n1,x,2\n", {}, "the header names 'a' more than once"),
        ("a,b\n1,x\n", {}, "has no column 'label', which data.label names; its columns: a, b"),
        ("a,label\n1,x\n", {"categorical": ("z",)}, "has no column 'z'"),
        ("label\nx\ny\n", {}, "has no column but the label"),
        ("a,label\n1,x\n2,x\n", {}, "label column 'label': must have 2 to 65536 distinct values, found 1"),
        ("a,label\n1,x\n2,?\n3,y\n", {}, r"column 'label', row 2 \(line 3\): the label is missing"),
        ("a,label\n1,1\n2,?\n3,2\n", {}, r"column 'label', row 2 \(line 3\): the label is missing"),
        ('a,label\n"1,x\n', {}, r"row 1 \(line 2\) cannot be parsed"),
        ("a,label\n1e200,x\n-1e200,y\n", {}, r"column 'a': values up to 1e\+200 are too large"),
    ],
)
def test_a_wrong_table_is_reported(tmp_path, training, options, said):
    with pytest.raises(BadData, match=rf"train\.csv.*{said}"):
        load(tmp_path, training, **options)


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        ("size,label\n1,yes\n", "lacks the columns colour"),
        ("size,colour,label\n1,red,maybe\n", 'the label is "maybe", which the training table does not have'),
        (
            "size,colour,label\n1,red,yes\nbig,red,yes\n",
            r"column 'size', row 2 \(line 3\): found 'big', where the training table has finite",
        ),
        ("size,colour,label\n1e300,red,yes\n", "column 'size': has values too far"),
    ],
)
def test_a_wrong_held_out_table_is_reported(tmp_path, held_out, said):
    with pytest.raises(BadData, match=rf"test\.csv.*{said}"):
        load(tmp_path, held_out=held_out)


def test_too_many_categories_are_refused(tmp_path):
    table = "a,label\n" + "".join(f"w{i},{i % 2}\n" for i in range(4097))
    with pytest.raises(BadData, match=r"train\.csv: column 'a': has 4,097 categories in 4,097 training rows, more"):
        load(tmp_path, table)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path):
    with pytest.raises(BadData, match=r"nowhere\.csv: cannot be read: No such file"):
        open_csv(CsvOptions(path=tmp_path / "nowhere.csv", label="label"))
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\xff")
    with pytest.raises(BadData, match=r"image\.csv: is not text in UTF-8"):
        open_csv(CsvOptions(path=tmp_path / "image.csv", label="label"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"separator": ""},
        {"separator": ",\n"},
        {"separator": '"'},
        {"columns": ("a", "a")},
        {"columns": ("a",)},
        {"quote": "''"},
        {"quote": ","},
        {"encoding": "latin-99"},
        {"encoding": "rot13"},
    ],
)
def test_refuses_wrong_options(tmp_path, wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        validated(CsvOptions, {"path": tmp_path, "label": "label", **wrong})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=60), st.text('01.?,"\nxe-', max_size=60).map(lambda t: f"a,label\n{t}".encode())))
def test_any_bytes_are_read_or_refused(tmp_path, content):
    path = tmp_path / "fuzz.csv"
    path.write_bytes(content)
    source, refusal = None, ""
    try:
        source = open_csv(CsvOptions(path=path, label="label", missing="?"))
    except BadData as error:
        refusal = str(error)
    if source is None:
        assert str(path) in refusal
    else:
        assert np.isfinite(source.examples(np.arange(source.spec.examples))[0]).all()


def test_a_blank_line_between_rows_of_one_column_is_an_empty_cell(tmp_path):
    file = tmp_path / "one.csv"
    assert texts_of(file, b"\nx\n0.1\n\n0.3\n\n")[0] == {"x": ["0.1", "", "0.3"]}
    assert texts_of(file, b"x,y\n0.1,1\n\n0.3,2\n")[0]["x"] == ["0.1", "0.3"]
