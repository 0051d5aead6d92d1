"""What is saved beside the weights: it encodes new rows as the training rows were, bit by bit, after a round trip."""

import math

import numpy as np
import pytest

from parashard.data.array_files import NpzOptions, open_npz
from parashard.data.preprocessing import Preprocessing, as_json, read_preprocessing
from parashard.data.table_files import CsvOptions, open_csv
from parashard.errors import BadData

ROWS = [
    {"age": 39, "work": "State-gov", "zip": "01", "label": "no"},
    {"age": 50.25, "work": None, "zip": "7", "label": "yes"},
    {"age": None, "work": "Private", "zip": "01", "label": "no"},
    {"age": 0.1, "work": "Private", "zip": "9", "label": "yes"},
]


@pytest.fixture
def source(tmp_path):
    lines = [",".join("?" if value is None else str(value) for value in row.values()) for row in ROWS]
    (tmp_path / "a.csv").write_text("age,work,zip,label\n" + "\n".join(lines))
    options = CsvOptions(path=tmp_path / "a.csv", label="label", missing="?", categorical=("zip",), held_out=0.0)
    return open_csv(options)


@pytest.fixture
def read(source, tmp_path) -> Preprocessing:
    (tmp_path / "preprocessing.json").write_bytes(as_json(source.spec.preprocessing))
    return read_preprocessing(tmp_path / "preprocessing.json")


def test_rows_are_encoded_as_the_training_was(source, read):
    assert read == source.spec.preprocessing
    np.testing.assert_array_equal(read.inputs(ROWS), source.examples(np.arange(4))[0])
    texts = [{name: "?" if value is None else str(value) for name, value in row.items()} for row in ROWS]
    np.testing.assert_array_equal(read.inputs(texts), source.examples(np.arange(4))[0])


def test_it_says_what_the_outputs_mean(read):
    assert (read.target.name, read.target.classes) == ("label", ("no", "yes"))


def test_numpy_s_values_nan_and_unknown_names_are_taken(read):
    row = {"age": np.float32(39), "work": "Abroad", "zip": np.int64(7)}
    assert read.inputs([row, row | {"age": math.nan}])[:, 1].tolist() == [0, 1]
    assert read.inputs([row])[0, 2:].tolist() == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"age": 1, "work": "Private"}, "row 1 has no column 'zip'"),
        ({"age": "old", "work": "Private", "zip": "01"}, "column 'age', row 1: found 'old'"),
        ({"age": math.inf, "work": "Private", "zip": "01"}, "column 'age', row 1: found 'inf'"),
    ],
)
def test_a_row_that_cannot_be_encoded_is_reported(read, row, said):
    with pytest.raises(BadData, match=said):
        read.inputs([row])


def test_arrays_have_a_scale_and_numbered_classes(tmp_path):
    np.savez(tmp_path / "a.npz", inputs=np.ones((4, 2)), targets=np.array([1.5, 2.5, 1.5, 2.5]))
    saved = open_npz(NpzOptions(path=tmp_path / "a.npz", held_out=0.0)).spec.preprocessing
    assert (saved.input_shape, saved.divide_by, saved.columns) == ((2,), 1.0, None)
    assert (saved.target.mean, saved.target.deviation) == (2.0, 0.5)
    with pytest.raises(BadData, match="the data were arrays, not a table"):
        saved.inputs([{}])


@pytest.mark.parametrize(("content", "said"), [("{}", "does not describe preprocessing"), ("[", "does not describe")])
def test_another_file_is_refused(tmp_path, content, said):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(BadData, match=said):
        read_preprocessing(tmp_path / "p.json")
    with pytest.raises(BadData, match="cannot be read: No such file"):
        read_preprocessing(tmp_path / "absent.json")
