"""Texts that mean the same, in two tables, two formats and afterwards; what is told of missing and unknown cells."""

import numpy as np
import pytest
from pydantic import ValidationError

from parashard.data.columns import words
from parashard.data.input_columns import KeyColumn
from parashard.data.options import CsvOptions
from parashard.data.table_files import open_csv
from parashard.errors import BadData
from parashard.frozen_model import validated

HEAD = "g,x,label\n"


def load(folder, training, held_out=None, **options):
    (folder / "t.csv").write_text(training)
    if held_out is not None:
        (folder / "h.csv").write_text(held_out)
        options["held_out_path"] = folder / "h.csv"
    return open_csv(CsvOptions(path=folder / "t.csv", **({"label": "label", "held_out": 0.0} | options)))


def rows_of(source):
    return source.examples(np.arange(source.spec.examples))[0]


VARIANTS = [("1", "1.0"), ("2.0", "02"), ("Delft", " Delft "), ("TRUE", "True"), ("true", "FALSE")]


@pytest.mark.parametrize(("in_training", "in_held_out"), VARIANTS[:-1])
@pytest.mark.parametrize("options", [{"categorical": ("g",)}, {"key_columns": ("g",)}])
def test_a_text_is_the_same_in_a_held_out_table_and_afterwards(tmp_path, in_training, in_held_out, options):
    training = f"{HEAD}{in_training},0.5,a\nother,1.5,b\n"
    source = load(tmp_path, training, f"{HEAD}{in_held_out},0.5,a\n,1,a\n", **options)
    ours, held_out = rows_of(source), source.held_out(0, 1)[0]
    if isinstance(ours, dict):
        ours, held_out = ours["keys"], held_out["keys"]
    assert held_out[0].tolist() == ours[0].tolist()
    fitted = source.spec.preprocessing
    for value in (in_training, in_held_out, {"TRUE": True, "1": 1.0}.get(in_training, in_training)):
        again = fitted.inputs([{"g": value, "x": 0.5}])
        again = again["keys"] if isinstance(again, dict) else again
        assert again[0].tolist() == ours[0].tolist()


def test_texts_of_one_table_that_mean_the_same_are_one_and_are_counted(tmp_path):
    table = HEAD + "1,0.5,a\n1.0,1.5,b\n02,2.5,a\n 2,2.5,b\nz,3.5,a\n"
    for options in ({"categorical": ("g",)}, {"key_columns": ("g",)}):
        spec = load(tmp_path, table, **options).spec
        assert spec.figures()["cells"] == {"g": {"missing": 0, "unknown": 0, "merged": 2}}
        assert spec.warnings == ("column 'g': '02' and '2' are one text, as are 1 more groups of texts",)
    assert rows_of(load(tmp_path, table, categorical=("g",)))[:, :3].tolist() == [
        [0, 1, 0],
        [0, 1, 0],
        [1, 0, 0],
        [1, 0, 0],
        [0, 0, 1],
    ]
    assert load(tmp_path, table, key_columns=("g",)).spec.hashed == (3, 3)


def test_labels_that_mean_the_same_are_one_class(tmp_path):
    source = load(tmp_path, "x,label\n1,TRUE\n2,FALSE\n3,True\n4, FALSE\n", "x,label\n1,true\n2,False\n")
    assert source.spec.preprocessing.target.classes == ("FALSE", "TRUE")
    assert source.examples(np.arange(4))[1].tolist() == [1, 0, 1, 0]
    assert source.held_out(0, 2)[1].tolist() == [1, 0]


def test_texts_that_differ_in_case_are_two_and_told_of(tmp_path):
    spec = load(tmp_path, HEAD + "BE,0.5,a\nbe,1.5,b\nBE ,1,a\n").spec
    assert spec.input_shape == (3,)
    assert spec.warnings == ("column 'g': 'BE' and 'be' differ in case alone; each is a text of its own",)


def test_ids_that_were_written_as_floats_are_told_of(tmp_path):
    spec = load(tmp_path, HEAD + "1.2345678901234568e+18,0.5,a\n,1.5,b\n", key_columns=("g",)).spec
    assert spec.warnings[0] == (
        "column 'g' has names such as '1.2345678901234568e+18', numbers that have lost their last digits; write them "
        "as whole numbers"
    )


def test_codes_with_leading_zeros_are_text(tmp_path):
    spec = load(tmp_path, HEAD + "04064,0.5,a\n10115,1.5,b\n4064,1,a\n").spec
    assert spec.input_shape == (3,)
    assert "column 'g' is read as text, for its whole numbers have leading zeros, such as '04064'" in spec.warnings
    values = load(tmp_path, "x,label\n1,007\n2,1.5\n", target="value")
    assert values.examples(np.arange(2))[1].tolist() == [7, 1.5]


@pytest.mark.parametrize("options", [{"categorical": ("g",)}, {"key_columns": ("g",)}])
def test_a_held_out_column_of_which_nothing_is_known_is_warned_of(tmp_path, options):
    training = HEAD + "".join(f"c{n % 3},0.{n},{'ab'[n % 2]}\n" for n in range(9))
    spec = load(tmp_path, training, training.replace("c", "C"), **options).spec
    assert spec.figures()["cells"] == {"g": {"missing": 0, "unknown": 9, "merged": 0}}
    assert spec.warnings == (
        "column 'g': 9 of its 9 held-out texts, such as 'C0', are unknown: nothing was learned of them",
    )
    few = load(tmp_path, training, training.replace("c1", "C1"), **options).spec
    assert (few.figures()["cells"]["g"]["unknown"], few.warnings) == (3, ())


COUNTRIES = HEAD + "NA,0.5,a\nZA,NA,b\n,1.5,a\nNA,2.5,b\nnull,null,a\n"


def test_names_that_look_missing_are_counted_and_can_be_names(tmp_path):
    spec = load(tmp_path, COUNTRIES).spec
    assert spec.figures()["cells"] == {
        "g": {"missing": 4, "unknown": 0, "merged": 0},
        "x": {"missing": 2, "unknown": 0, "merged": 0},
    }
    assert spec.warnings == (
        "column 'g': 2 cells 'NA' and 1 cells 'null' are read as missing; data.not_missing = [\"NA\", \"null\"] "
        "reads them as names",
    )
    source = load(tmp_path, COUNTRIES, not_missing=("NA",))
    inputs = rows_of(source)
    assert inputs[:, :3].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1]]
    assert inputs[:, 4].tolist() == [0, 1, 0, 0, 1], "in a column of numbers NA is missing all the same"
    again = source.spec.preprocessing.inputs([{"g": "NA", "x": "NA"}, {"g": float("nan"), "x": 0.5}])
    assert again[:, :3].tolist() == [[1, 0, 0], [0, 0, 1]]
    assert again[:, 4].tolist() == [1, 0]
    assert load(tmp_path, "x,label\n1,NA\n2,EU\n", not_missing=("NA",)).spec.classes == 2
    with pytest.raises(ValidationError, match="not_missing has texts that mean a missing value"):
        validated(CsvOptions, {"path": tmp_path, "label": "label", "not_missing": ["?"]})


def test_a_label_that_looks_missing_names_the_key(tmp_path):
    with pytest.raises(BadData, match=r"the label is missing \(in 2 rows\).*data.not_missing = ..NA.. reads it as"):
        load(tmp_path, "x,label\n1,NA\n2,EU\n3,AS\n4,NA\n")


def test_several_texts_may_stand_for_a_missing_value(tmp_path):
    source = load(tmp_path, HEAD + "?,0.5,a\nb,-,b\n-,1.5,a\n", missing=("?", "-"))
    assert rows_of(source)[:, :2].tolist() == [[0, 1], [1, 0], [0, 1]]
    fitted = source.spec.preprocessing
    assert fitted.inputs([{"g": "-", "x": "?"}])[0].tolist() == [0, 1, 0, 1]


def test_keys_of_earlier_runs_are_as_they_were():
    texts = words(["02", "2"])
    assert len(set(KeyColumn(name="g").keys_of(texts).tolist())) == 2
    assert len(set(KeyColumn(name="g", canonical=True).keys_of(texts).tolist())) == 1
