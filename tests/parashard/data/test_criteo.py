"""Criteo's click log: numbers, keys, splits, and every malformed row is BadData that names file and row."""

from __future__ import annotations

import gzip
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from parashard.data import criteo, open_source
from parashard.data.arrays import ArraySource
from parashard.data.hashing import keys_of_texts, seed_of
from parashard.data.options import CriteoOptions, DataOptions
from parashard.data.preprocessing import as_json, read_preprocessing
from parashard.errors import BadData, ConfigurationError
from parashard.frozen_model import validated
from parashard.process.extras import install
from support.click_cases import criteo_log, criteo_row

pytest.importorskip("pyarrow")

NUMBERS = (0, 1, "", -3, 200, *range(5, 13))
TEXTS = ("05db9164", "", "05db9164", *(f"{n:08x}" for n in range(23)))


def load(path: Path, *rows: str, **options: Any) -> ArraySource:
    path.write_text("".join(f"{row}\n" for row in rows))
    return criteo.open_criteo(CriteoOptions(path=path, **{"held_out": 0.0, **options}))


def everything(source: ArraySource) -> tuple[Any, Any, Any]:
    inputs, targets = source.examples(np.arange(source.spec.examples))
    return inputs["numbers"], inputs["keys"], targets


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.txt"


def test_a_row_is_a_label_13_numbers_and_26_keys(path: Path) -> None:
    source = load(path, criteo_row(1, NUMBERS, TEXTS), criteo_row(0))
    numbers, keys, targets = everything(source)
    assert (numbers.shape, numbers.dtype) == ((2, 13), np.float32)
    assert (keys.shape, keys.dtype) == ((2, 26), np.int64)
    assert targets.tolist() == [1, 0]
    assert source.spec.summary() == (
        "2 training rows, 0 held out; 13 numeric and 26 text columns as inputs numbers (13) float32, keys (26) int64; "
        "2 classes of label (0, 1)"
    )


def test_a_text_s_key_is_its_hash_by_its_column_and_an_empty_one_has_one_too(path: Path) -> None:
    _, keys, _ = everything(load(path, criteo_row(1, NUMBERS, TEXTS), criteo_row(0)))
    for row, texts in zip(keys, (TEXTS, [""] * 26), strict=True):
        due = [keys_of_texts([text], seed_of(f"C{n}")).view(np.int64)[0] for n, text in enumerate(texts, start=1)]
        assert row.tolist() == due
    assert len(set(keys.ravel().tolist())) == 51, "C2 is empty in both rows; no other key is there twice"


def test_texts_may_begin_anywhere_in_arrow_s_buffers() -> None:
    import pyarrow as pa

    texts = pa.array([b"a", b"", b"bcd", b"e"], pa.binary())[1:3]
    assert criteo._keys(texts, 5).view(np.uint64).tolist() == keys_of_texts(["", "bcd"], 5).tolist()
    assert len(criteo._keys(pa.array([b"", b""], pa.binary()), 5)) == 2


def test_numbers_are_logarithms_standardised_by_the_training_rows(path: Path) -> None:
    rows = [criteo_row(n % 2, [number]) for n, number in enumerate(["0", "", "10", "-2", "999"])]
    numbers, _, _ = everything(load(path, *rows))
    logs = [0.0, math.log(11), -2.0, math.log(1000)]
    due = (np.array(logs) - np.mean(logs)) / np.std(logs)
    np.testing.assert_allclose(numbers[[0, 2, 3, 4], 0], due, rtol=1e-6)
    assert numbers[1, 0] == 0, "missing"
    assert not numbers[:, 1:].any(), "columns without any number"


def test_the_last_rows_are_held_out_and_teach_nothing(path: Path) -> None:
    rows = [criteo_row(n % 2, [min(n, 8) * 100]) for n in range(10)]
    source = load(path, *rows, held_out=0.2)
    assert (source.spec.examples, source.spec.held_out) == (8, 2)
    numbers, _, targets = everything(source)
    assert abs(numbers[:, 0].mean()) < 1e-6
    assert targets.tolist() == [0, 1] * 4
    inputs, held_out_targets = source.held_out(0, 2)
    assert held_out_targets.tolist() == [0, 1]
    assert inputs["numbers"][0, 0] == inputs["numbers"][1, 0] > numbers[:, 0].max()


def test_rows_by_the_split_s_seed_can_be_held_out(path: Path) -> None:
    rows = [criteo_row(n % 2, [n]) for n in range(50)]
    options = CriteoOptions(path=path, split="random", held_out=0.2, split_seed=3)
    source = load(path, *rows, split="random", held_out=0.2, split_seed=3)
    training, held_out = options.rows(50)
    assert everything(source)[2].tolist() == (training % 2).tolist()
    assert source.held_out(0, 10)[1].tolist() == (held_out % 2).tolist()
    assert source.spec.fingerprint != load(path, *rows, held_out=0.2).spec.fingerprint


def test_a_held_out_log_is_encoded_with_what_training_taught(path: Path, tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text(criteo_row(1, [3], ["0000000b"]) + "\n")
    source = load(
        path, criteo_row(0, [0], ["0000000a"]), criteo_row(1, [1]), held_out_path=tmp_path / "test.txt", held_out=0.9
    )
    assert (source.spec.examples, source.spec.held_out) == (2, 1)
    inputs, _ = source.held_out(0, 1)
    assert inputs["numbers"][0, 0] == pytest.approx((math.log(4) - math.log(2) / 2) / (math.log(2) / 2))
    assert inputs["keys"][0, 0] == keys_of_texts(["0000000b"], seed_of("C1")).view(np.int64)[0]


def test_a_log_may_be_compressed_whatever_its_name(path: Path, tmp_path: Path) -> None:
    plain = criteo.open_criteo(CriteoOptions(path=criteo_log(path, 300)))
    for name in ("train.txt.gz", "zipped"):
        (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
        assert criteo.open_criteo(CriteoOptions(path=tmp_path / name)).spec == plain.spec


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_the_last_line_needs_no_end(path: Path, ends: bytes) -> None:
    path.write_bytes(ends.join([criteo_row(1).encode(), criteo_row(0, [], TEXTS).encode()]))
    source = criteo.open_criteo(CriteoOptions(path=path, held_out=0.0))
    assert source.spec.examples == 2
    assert everything(source)[1][1].tolist() == everything(load(path, criteo_row(0, [], TEXTS)))[1][0].tolist()


def test_blocks_are_put_end_to_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = criteo.open_criteo(CriteoOptions(path=criteo_log(path, 400)))
    for name, value in (("_BLOCK_BYTES", 1000), ("_BLOCK_ROWS", 7)):
        monkeypatch.setattr(criteo, name, value)
    assert criteo.open_criteo(CriteoOptions(path=path)).spec == whole.spec
    assert whole.spec.examples == 320


def test_the_fingerprint_is_pinned(path: Path) -> None:
    """It must not depend on the machine: logarithms and sums are computed in one way."""
    source = criteo.open_criteo(CriteoOptions(path=criteo_log(path, 200)))
    assert source.spec.fingerprint == "ec9b792dafce08f6a858745ca72daa0b62729a71b0139c3032cd3c2367e6deb1"


def test_rows_have_afterwards_the_inputs_that_they_had_in_training(path: Path, tmp_path: Path) -> None:
    source = load(path, criteo_row(1, NUMBERS, TEXTS), criteo_row(0, [5] * 13, ["0000000a"]))
    assert source.spec.preprocessing is not None
    (tmp_path / "p.json").write_bytes(as_json(source.spec.preprocessing))
    read = read_preprocessing(tmp_path / "p.json")
    rows = [dict(zip(criteo.COLUMNS, line.split("\t"), strict=True)) for line in path.read_text().splitlines()]
    found, (numbers, keys, _) = read.inputs(rows), everything(source)
    np.testing.assert_array_equal(found["numbers"], numbers)
    np.testing.assert_array_equal(found["keys"], keys)
    assert read.fields() == source.spec.fields[:2]


# --- malformed rows ---

GOOD = criteo_row(1, NUMBERS, TEXTS)
WHOLE = "nothing, or a whole number from -2147483647 to 2147483647"
FIELDS = "fields; allowed: 40 with tabs between them, a label, 13 whole numbers and 26 texts"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (criteo_row(1) + "\t", f"row 3 has 41 {FIELDS}"),
        (criteo_row(1)[:-1], f"row 3 has 39 {FIELDS}"),
        ("", f"row 3 has 1 {FIELDS}"),
        (GOOD.replace("\t", ","), f"row 3 has 1 {FIELDS}"),
        (criteo_row(2), "column 'label', row 3: found '2'; allowed: 0 or 1"),
        (criteo_row(-1), "column 'label', row 3: found '-1'; allowed: 0 or 1"),
        (criteo_row(""), "column 'label', row 3: found ''; allowed: 0 or 1"),
        (criteo_row("yes"), "column 'label', row 3: found 'yes'; allowed: 0 or 1"),
        (criteo_row(1000), "column 'label', row 3: found '1000'; allowed: 0 or 1"),
        (criteo_row(1, [1, "many"]), f"column 'I2', row 3: found 'many'; allowed: {WHOLE}"),
        (criteo_row(1, [1, 2, 1.5]), f"column 'I3', row 3: found '1.5'; allowed: {WHOLE}"),
        (criteo_row(1, [2**31]), f"column 'I1', row 3: found '2147483648'; allowed: {WHOLE}"),
        (criteo_row(1, ["x" * 60]), f"column 'I1', row 3: found '{'x' * 40}...'; allowed: {WHOLE}"),
    ],
)
@pytest.mark.parametrize("block", [2 * len(GOOD), 1 << 20])
@pytest.mark.parametrize("after", [(GOOD,), (GOOD, "bad too")])
def test_a_malformed_row_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, row: str, said: str, block: int, after: tuple[str, ...]
) -> None:
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", block)
    with pytest.raises(BadData) as refused:
        load(path, GOOD, GOOD, row, *after)
    assert refused.value.message == f"{path}: {said}"


def test_a_malformed_row_far_in_is_named_and_one_of_a_held_out_log(path: Path, tmp_path: Path) -> None:
    good = criteo_log(tmp_path / "good.txt", 5000)
    lines = good.read_text().splitlines()
    lines[4321] = lines[4321].replace("\t", "\tx", 1)
    with pytest.raises(BadData, match=rf"{path}: column 'I1', row 4322: found 'x"):
        load(path, *lines)
    with pytest.raises(BadData, match=rf"{path}: column 'I1', row 4322: found 'x"):
        criteo.open_criteo(CriteoOptions(path=good, held_out_path=path))


@pytest.mark.parametrize("content", [b"", gzip.compress(b"")], ids=["plain", "compressed"])
def test_a_log_without_rows_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(BadData, match=rf"{path}: has no rows"):
        criteo.open_criteo(CriteoOptions(path=path))


def test_a_file_that_cannot_be_read_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=rf"{path}: cannot be read: No such file or directory"):
        criteo.open_criteo(CriteoOptions(path=path))
    with pytest.raises(BadData, match=rf"{tmp_path}: cannot be read: Is a directory"):
        criteo.open_criteo(CriteoOptions(path=tmp_path))


@pytest.mark.parametrize("damage", [lambda c: c[:-20], lambda c: c[:50] + b"\xff" * 20 + c[70:], lambda c: c[:2]])
def test_a_damaged_compressed_log_is_named(path: Path, damage: Any) -> None:
    path.write_bytes(damage(gzip.compress(criteo_log(path, 200).read_bytes())))
    with pytest.raises(BadData, match=rf"{path}: "):
        criteo.open_criteo(CriteoOptions(path=path))


def test_names_the_extra_where_pyarrow_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=rf"{path}: .*{re.escape(install('parquet'))}"):
        criteo.open_criteo(CriteoOptions(path=path))


# --- options ---


def test_it_is_opened_by_its_name(path: Path) -> None:
    criteo_log(path, 100)
    options = validated(DataOptions, {"source": "criteo", "path": str(path), "held_out": 0.25})
    assert isinstance(options, CriteoOptions)
    assert open_source(options).spec.held_out == 25
    assert validated(DataOptions, options.plain()) == options


@pytest.mark.parametrize("wrong", [{"split": "first"}, {"held_out": 1.0}, {"label": "label"}])
def test_refuses_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        validated(CriteoOptions, {"path": "/x", **wrong})
