"""Vocabularies of columns: keys by place, texts that are unknown, files that are wrong, and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from parashard.data.arrays import ArraySource
from parashard.data.columns import MissingTexts
from parashard.data.hashing import keys_of_texts, seed_of
from parashard.data.input_columns import VOCABULARY_BYTES_MAX, KnownKeyColumn, KnownKeysColumn, read_vocabularies
from parashard.data.options import CsvOptions, ParquetOptions
from parashard.data.preprocessing import as_json, read_preprocessing
from parashard.data.table_files import open_csv
from parashard.data.tree import NO_KEY
from parashard.errors import BadData
from parashard.frozen_model import validated

TABLE = """city,genres,home,label
Bonn,comedy|noir,x,yes
,action,y,no
Rom,,x,yes
 Ulm ,action|action,x,no
"""


def load(folder: Path, table: str = TABLE, test: str | None = None, **options: Any) -> ArraySource:
    (folder / "train.csv").write_text(table)
    (folder / "cities.txt").write_text("Ulm\n Bonn \n")
    (folder / "genres.txt").write_text("action\r\ncomedy\r\n")
    if test is not None:
        (folder / "test.csv").write_text(test)
        options["held_out_path"] = folder / "test.csv"
    given: dict[str, Any] = {
        "vocabularies": {"genres": folder / "genres.txt", "city": folder / "cities.txt"},
        "list_columns": ("genres",),
        "key_columns": ("*",),
        "held_out": 0.0,
    }
    return open_csv(CsvOptions(path=folder / "train.csv", label="label", **{**given, **options}))


def inputs_of(source: ArraySource) -> Any:
    return source.examples(np.arange(source.spec.examples))[0]


def test_a_text_has_the_key_of_its_line_and_unknown_and_missing_ones_have_keys_behind_all(tmp_path: Path) -> None:
    source = load(tmp_path)
    inputs = inputs_of(source)
    assert inputs["keys"][:, 0].tolist() == [1, 3, 2, 0]  # Ulm 0, Bonn 1, unknown 2, missing 3
    of_genres = 4  # behind those of the cities, which are the earlier column
    assert inputs["lists"]["genres"].tolist() == [
        [of_genres + 1, of_genres + 2],
        [of_genres, NO_KEY],
        [NO_KEY, NO_KEY],
        [of_genres, of_genres],
    ]
    homes = keys_of_texts(["x", "y", "x", "x"], seed_of("home")).view(np.int64)
    assert inputs["keys"][:, 1].tolist() == homes.tolist()
    assert source.spec.hashed == (2, 2)  # those of the vocabularies are no hashes
    assert source.spec.preprocessing is not None
    columns = {column.name: column for column in source.spec.preprocessing.columns or ()}
    assert columns["city"] == KnownKeyColumn(name="city", texts=("Ulm", "Bonn"), first=0, unknown="key")
    assert isinstance(columns["genres"], KnownKeysColumn)
    assert columns["genres"].first == of_genres


def test_a_vocabulary_makes_keys_of_a_column_that_nothing_else_names(tmp_path: Path) -> None:
    source = load(tmp_path, key_columns=(), list_columns=("genres",), ignore=("home",))
    assert inputs_of(source)["keys"].shape == (4, 1)
    assert source.spec.hashed is None
    assert "hashed" not in source.spec.summary()
    assert "hashed_texts" not in source.spec.figures()


def test_a_vocabulary_that_lacks_most_values_is_warned_of(tmp_path: Path) -> None:
    said = (
        "column 'city': 2 of its 3 values are not in its vocabulary, and have one key; is the file of "
        "data.vocabularies that of the column?"
    )
    assert load(tmp_path).spec.warnings == ()
    assert load(tmp_path, TABLE.replace("Ulm", "Ems")).spec.warnings == (said,)
    genres = load(tmp_path, TABLE.replace("action", "a|b")).spec.warnings
    assert [warning.partition(" are")[0] for warning in genres] == ["column 'genres': 7 of its 8 values"]


def test_codes_are_compared_as_texts(tmp_path: Path) -> None:
    (tmp_path / "codes.txt").write_text("01\n1\n")
    source = load(tmp_path, "a,label\n1,x\n01,y\n", vocabularies={"a": tmp_path / "codes.txt"}, list_columns=())
    assert inputs_of(source)["keys"].tolist() == [[1], [0]]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            TABLE,
            r"column 'city', row 3 \(line 4\): found 'Rom'; allowed: the 2 texts of the column's vocabulary \(data",
        ),
        (TABLE.replace("Rom", "Ulm"), r"column 'genres', row 1 \(line 2\): found 'noir'; allowed: the 2 texts"),
    ],
)
def test_an_unknown_text_is_refused_where_the_job_says_so(tmp_path: Path, table: str, said: str) -> None:
    known = TABLE.replace("Rom", "Bonn").replace("|noir", "")
    load(tmp_path, known, unknown_texts="refused")
    with pytest.raises(BadData, match=rf"train\.csv: {said}"):
        load(tmp_path, table, held_out=0.5, unknown_texts="refused")
    with pytest.raises(BadData, match=rf"test\.csv: {said}"):
        load(tmp_path, known, table, unknown_texts="refused")


def test_rows_have_afterwards_the_same_keys_without_the_files(tmp_path: Path) -> None:
    for unknown in ("key", "refused"):
        table = TABLE if unknown == "key" else TABLE.replace("Rom", "Bonn").replace("|noir", "")
        source = load(tmp_path, table, unknown_texts=unknown)
        assert source.spec.preprocessing is not None
        (tmp_path / "p.json").write_bytes(as_json(source.spec.preprocessing))
        for file in tmp_path.glob("*.txt"):
            file.unlink()
        read = read_preprocessing(tmp_path / "p.json")
        assert read == source.spec.preprocessing
        assert read.fields() == source.spec.fields[:3]
        names = TABLE.splitlines()[0].split(",")
        rows = [dict(zip(names, line.split(","), strict=True)) for line in table.splitlines()[1:]]
        found, due = read.inputs(rows), inputs_of(source)
        np.testing.assert_array_equal(found["keys"], due["keys"])
        np.testing.assert_array_equal(found["lists"]["genres"], due["lists"]["genres"])
    with pytest.raises(BadData, match="rows: column 'city', row 2: found 'Rom'; allowed: the 2 texts"):
        read.inputs([rows[0], {**rows[0], "city": "Rom"}])


# --- files ---


def refusal(path: Path, content: bytes, **more: Any) -> str:
    path.write_bytes(content)
    with pytest.raises(BadData) as error:
        read_vocabularies({"city": path}, **more)
    return str(error.value).replace(str(path), path.name)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; allowed: a text in each line"),
        (b" \n", "is empty; allowed: a text in each line"),
        (b"a\nb\na \n", "lines 1 and 3 are both 'a'"),
        (b"a\n\nb\n", "line 2 has '', which stands for a missing value"),
        (b"a\nN/A", "line 2 has 'N/A', which stands for a missing value"),
        (b"?\n", "line 1 has '?', which stands for a missing value"),
        (b"a\n\xff\n", "is not text in UTF-8: 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"),
    ],
)
def test_a_wrong_file_is_reported(tmp_path: Path, content: bytes, said: str) -> None:
    found = refusal(tmp_path / "cities.txt", content, marks=MissingTexts(also=("?",)))
    assert found == f"cities.txt: the vocabulary of column 'city': {said}"


def test_a_file_that_is_missing_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"c\.txt: the vocabulary of column 'city': cannot be read: No such file"):
        read_vocabularies({"city": tmp_path / "c.txt"})


def test_the_vocabularies_of_a_job_have_a_bound_together(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * (VOCABULARY_BYTES_MAX - 1) + b"\n")
    (tmp_path / "b.txt").write_bytes(b"y\n")
    assert len(read_vocabularies({"a": tmp_path / "a.txt"})["a"]) == 1
    with pytest.raises(BadData, match=r"b\.txt: the vocabulary of column 'b': makes the .* larger than 4 MiB"):
        read_vocabularies({"a": tmp_path / "a.txt", "b": tmp_path / "b.txt"})


def test_lines_may_end_as_they_like(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_bytes("\ufeffK\u00f6ln\r\nBad Ems\n\u2028x".encode())
    assert read_vocabularies({"city": tmp_path / "c.txt"})["city"] == ("Köln", "Bad Ems", "x")


@pytest.mark.parametrize("form", [CsvOptions, ParquetOptions])
def test_unknown_texts_are_of_vocabularies(form: Any) -> None:
    said = {"path": "/x", "label": "y", "unknown_texts": "refused"}
    with pytest.raises(ValidationError, match="unknown_texts is of columns in vocabularies, and no column is"):
        validated(form, said)
    assert validated(form, {**said, "vocabularies": {"a": "b.txt"}}).vocabularies == {"a": Path("b.txt")}


@pytest.mark.parametrize(
    ("column", "said"),
    [("town", "has no column 'town', which data.vocabularies names"), ("label", "data.vocabularies names the label")],
)
def test_wrong_names_are_reported(tmp_path: Path, column: str, said: str) -> None:
    with pytest.raises(BadData, match=said):
        load(tmp_path, vocabularies={column: tmp_path / "cities.txt"})
    with pytest.raises(BadData, match=r"data\.vocabularies names 'city', which data.ignore leaves out"):
        load(tmp_path, ignore=("city",))
