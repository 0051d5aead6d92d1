"""Texts that share a key: counted, and told with both, for a real collision of XXH64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parashard.data.base import DataSpec, HashedTexts
from parashard.data.hashing import keys_of_texts, seed_of
from parashard.data.input_columns import count_keys
from parashard.data.options import CsvOptions
from parashard.data.table_files import open_csv

PAIR = ("aaaaaaaabbbbbbbb", "SuiO81Zx01WpDBDV")
"""Of the column "user": the second halves make up for what the first ones differ in, as rounds are bijections."""
KEY = 6132493099564675867
SAID = (
    f"'{PAIR[0]}' of column 'user' and '{PAIR[1]}' of column 'user' have the same key, {KEY}, and so share a row of "
    "each table; data.vocabularies gives each text of a column a key of its own"
)


def load(folder: Path, rows: list[str], test: list[str] | None = None, **options: Any) -> DataSpec:
    for name, lines in (("train", rows), ("test", test)):
        if lines is not None:
            (folder / f"{name}.csv").write_text("\n".join(["user,n,label", *lines]) + "\n")
    if test is not None:
        options["held_out_path"] = folder / "test.csv"
    given: dict[str, Any] = {"key_columns": ("user",), "held_out": 0.0, **options}
    return open_csv(CsvOptions(path=folder / "train.csv", label="label", **given)).spec


def test_the_pair_has_one_key_by_the_seed_of_its_column_alone() -> None:
    assert keys_of_texts(PAIR, seed_of("user")).tolist() == [KEY, KEY]
    assert len(set(keys_of_texts(PAIR, seed_of("item")).tolist())) == 2


@pytest.mark.parametrize(
    "tables",
    [
        [[f"{PAIR[0]},1,x", f"{PAIR[1]},2,y", "c,1,x"]],
        [[f"{PAIR[0]},1,x", "c,2,y"], [f"{PAIR[1]},2,y", f"{PAIR[0]},2,y"]],  # one in the held-out table
    ],
)
def test_two_texts_with_one_key_are_told_of(tmp_path: Path, tables: list[list[str]]) -> None:
    spec = load(tmp_path, *tables)
    assert spec.hashed == (3, 2)
    assert spec.warnings == (SAID,)
    assert "; 3 texts hashed to 2 keys (chance of a collision 2e-19); " in spec.summary()
    figures = spec.figures()
    assert (figures["hashed_texts"], figures["hashed_keys"]) == (3, 2)
    assert figures["collision_chance"] == 9 / 2**65


def test_in_lists_too(tmp_path: Path) -> None:
    spec = load(tmp_path, [f"{'|'.join(PAIR)},1,x", "c,2,y"], key_columns=(), list_columns=("user",))
    assert (spec.hashed, spec.warnings) == ((3, 2), (SAID,))


def test_a_vocabulary_has_none(tmp_path: Path) -> None:
    (tmp_path / "users.txt").write_text("\n".join([*PAIR, "c"]))
    spec = load(tmp_path, [f"{PAIR[0]},1,x", f"{PAIR[1]},2,y"], vocabularies={"user": tmp_path / "users.txt"})
    assert (spec.hashed, spec.warnings) == (None, ())


def test_a_text_that_many_cells_have_counts_once_and_a_missing_cell_as_one(tmp_path: Path) -> None:
    assert load(tmp_path, ["a,1,x", "a,2,y", ",3,x", "b,4,y"]).hashed == (3, 3)


def test_a_few_pairs_are_named_and_the_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "parashard.data.input_columns.hashed", lambda texts, column: keys_of_texts(["one"] * len(texts))
    )
    found, warnings = count_keys({"a": ["x", "y", "z"], "b": ["x", "z"], "none": []})
    assert found == (5, 1)
    assert [warning.partition(" ha")[0] for warning in warnings] == [
        "'x' of column 'a' and 'y' of column 'a'",
        "'y' of column 'a' and 'z' of column 'a'",
        "'z' of column 'a' and 'x' of column 'b'",
        "1 more pair of texts",
    ]


def test_texts_without_a_collision_have_a_key_each() -> None:
    assert count_keys({"a": ["x", "y", ""], "b": ["x", "y"]}) == (HashedTexts(5, 5), [])
    assert count_keys({"a": []}) == (HashedTexts(0, 0), [])


def test_the_bound_is_that_of_birthdays() -> None:
    assert HashedTexts(0, 0).chance == 0
    assert HashedTexts(10**9, 10**9).chance == pytest.approx(1 / 37, rel=0.01)
    assert HashedTexts(1 << 40, 1 << 40).chance == 1
