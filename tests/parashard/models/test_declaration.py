"""What is declared of a job's data and model arrives in another process as it is, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from parashard.data import open_source
from parashard.data.base import DataSpec, Field, HashedTexts
from parashard.errors import BadData, ConfigurationError, StoreFailed
from parashard.job.load import job_from_toml
from parashard.models.declaration import (
    RECORD_FILE,
    ROWS_FILE,
    SLOTS_FILE,
    VALUES_FILE,
    DeclaredJob,
    declare,
    declare_named,
    read_declaration,
    write_declaration,
)
from parashard.plan.embedding import KeyedRows
from parashard.plan.variables import Float32s, Initializer, Variable
from support.resolved_job import resolved_here
from support.small_job import SMALL_JOB

SPEC = DataSpec(20, 4, (3, 2), 5, "ab" * 32, warnings=("column a has one value",), hashed=HashedTexts(7, 6))
DRAWN = Variable("drawn", (4, 3), Initializer("normal", 0.5), decay=False, learning_rate_factor=2.0, encoding="int8")
MEAN = Variable("mean", (2,), state="average:0.1")
STARTS = {
    "drawn": DRAWN,
    "given": np.arange(6.0).reshape(2, 3),
    "still": Variable("still", (1,), frozen=True),
    "mean": (MEAN, [1.0, 2.0]),
}


class Mine:
    """A model of which only what it starts from counts."""

    def __init__(self, starts: Any) -> None:
        self.starts = starts

    def initial_variables(self) -> Mapping[str, Variable | Float32s]:
        return self.starts  # type: ignore[no-any-return]

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        raise NotImplementedError

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Any:
        raise NotImplementedError


ROWS = {"user": KeyedRows(np.array([2, 2**64 - 1], np.uint64), np.arange(6, dtype=np.float32).reshape(2, 3))}


SLOTS = {"velocity": {"given": np.ones((2, 3), np.float32), "a/b": np.arange(2, dtype=np.float32)}}
OF_ROWS = ROWS["user"]._replace(
    t=np.array([1, 7], np.uint32), slots={"m": np.ones((2, 3), np.float32), "v": np.zeros((2, 3), np.float32)}
)


GOING_ON = replace(declare(SPEC, Mine(STARTS)), rows={"user": OF_ROWS}, slots=SLOTS)


class Judging(Mine):
    def audit(self, variables: Mapping[str, Float32s], epochs: int) -> Mapping[str, int]:
        return {}


@pytest.fixture
def declared() -> DeclaredJob:
    return declare(SPEC, Mine(STARTS), "c" * 64)


@pytest.fixture
def written(declared: DeclaredJob, tmp_path: Path) -> Path:
    write_declaration(tmp_path, declared)
    return tmp_path


def assert_equal(a: DeclaredJob, b: DeclaredJob) -> None:
    assert (a.spec, dict(a.variables), a.model_sha256) == (b.spec, dict(b.variables), b.model_sha256)
    assert a.arrays.keys() == b.arrays.keys()
    for name, array in a.arrays.items():
        np.testing.assert_array_equal(array, b.arrays[name], strict=True)


def test_it_arrives_as_it_is(declared: DeclaredJob, written: Path) -> None:
    assert set(declared.arrays) == {"given", "mean"}
    assert (declared.variables["drawn"], declared.variables["mean"]) == (DRAWN, MEAN)
    assert_equal(read_declaration(written), declared)


def test_rows_of_tables_arrive_as_they_are_where_they_are_asked_for(tmp_path: Path) -> None:
    declared = replace(declare(SPEC, Mine(STARTS)), rows=ROWS)
    write_declaration(tmp_path, declared)
    arrived = read_declaration(tmp_path)
    assert_equal(arrived, declared)
    for found, due in zip(arrived.rows["user"], ROWS["user"], strict=True):
        np.testing.assert_array_equal(found, due, strict=True)
    assert read_declaration(tmp_path, rows=False).rows == {}


def test_an_optimizers_state_arrives_as_it_is(tmp_path: Path) -> None:
    write_declaration(tmp_path, GOING_ON)
    arrived = read_declaration(tmp_path)
    np.testing.assert_equal(arrived.slots, SLOTS)
    np.testing.assert_equal(arrived.rows["user"]._asdict(), OF_ROWS._asdict())
    left = read_declaration(tmp_path, rows=False)
    assert (left.rows, left.slots) == ({}, {})


def test_another_state_than_was_written_is_refused(tmp_path: Path) -> None:
    write_declaration(tmp_path, GOING_ON)
    save_file({"velocity/given": np.zeros((2, 3), np.float32)}, tmp_path / SLOTS_FILE)
    with pytest.raises(BadData, match=r"declaration_slots\.safetensors: this is not the optimizer's state"):
        read_declaration(tmp_path)


@pytest.mark.parametrize(
    "change", [{"user/keys": np.array([2, 3], np.uint64)}, {"user/values": None}, {"item/keys": ROWS["user"].keys}]
)
def test_other_rows_than_were_written_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    write_declaration(tmp_path, replace(declare(SPEC, Mine(STARTS)), rows=ROWS))
    parts = {"user/keys": ROWS["user"].keys, "user/values": ROWS["user"].values} | change
    save_file({name: array for name, array in parts.items() if array is not None}, tmp_path / ROWS_FILE)
    with pytest.raises(BadData, match=r"declaration_rows.safetensors: (these are not the rows|'.*' is missing)"):
        read_declaration(tmp_path)


def test_the_arrays_of_an_example_arrive_too(tmp_path: Path) -> None:
    fields = Field("inputs/ids", (12,), "int64"), Field("targets", (), "float32")
    declared = declare(DataSpec(20, 4, (12,), 0, "ab" * 32, fields=fields, batched=True), Mine(STARTS))
    write_declaration(tmp_path, declared)
    assert_equal(read_declaration(tmp_path), declared)


def test_a_disk_that_is_full_is_a_sentence_with_its_place(
    declared: DeclaredJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("parashard.models.declaration.write_arrays", full)
    with pytest.raises(StoreFailed, match=rf"{tmp_path}: cannot write what the job begins with: I/O error: No space"):
        write_declaration(tmp_path, declared)
    assert not (tmp_path / RECORD_FILE).exists()


def test_without_arrays_there_is_one_file(tmp_path: Path) -> None:
    drawn = declare(SPEC, Mine({"drawn": DRAWN}))
    write_declaration(tmp_path, drawn)
    assert [file.name for file in tmp_path.iterdir()] == [RECORD_FILE]
    assert_equal(read_declaration(tmp_path), drawn)


@pytest.mark.parametrize("kind", ["titanic", "digits"])
def test_how_inputs_are_made_arrives_too(kind: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,y\n" + "".join(f"{i}.5,{'xy'[i % 2]},{i % 3}\n" for i in range(12)))
    source = {
        "titanic": f'source = "csv"\npath = "{tmp_path}/t.csv"\nlabel = "y"\ntarget = "class"',
        "digits": 'source = "digits"',
    }
    job = job_from_toml(SMALL_JOB.replace('source = "synthetic"', source[kind]))
    assert open_source(job.data).spec.preprocessing is not None
    declared = declare_named(job, None)
    write_declaration(tmp_path, declared)
    assert_equal(read_declaration(tmp_path), declared)


CLICKS = """
data = { source = "clicks", examples = 20, numbers = 2, columns = 3, vocabulary = 9 }
job = { name = "small", epochs = 1, batch_size = 4 }
model = { kind = "dlrm" }
optimizer = { kind = "sgd", learning_rate = 0.1 }
"""


def test_a_table_that_is_not_used_is_named_before_a_job_begins() -> None:
    both = job_from_toml(CLICKS + "tables = { deep = { dimension = 2 }, wide = { dimension = 1 } }")
    assert declare_named(both, None).spec.warnings == (
        "tables.wide: the model uses no row of it for the first examples; if it never does, leave it out",
    )
    deep = job_from_toml(CLICKS + "tables = { deep = { dimension = 2 } }")
    assert declare_named(deep, None).spec.warnings == ()
    other = job_from_toml(CLICKS + "tables = { deep = { dimension = 2 }, x = { dimension = 1 } }")
    with pytest.raises(
        ConfigurationError, match=r"^tables\.x: model kind 'dlrm' does not use it; allowed: tables\.deep$"
    ):
        declare_named(other, None)
    dense = job_from_toml(SMALL_JOB + "[tables.x]\ndimension = 1\n")
    with pytest.raises(ConfigurationError, match="the job declares the tables x, and the model uses none"):
        declare_named(dense, None)


def test_a_model_that_can_judge_final_weights_does_so_where_it_is(tmp_path: Path) -> None:
    model = Judging(STARTS)
    declared = declare(SPEC, model)
    assert declared.auditor is model
    write_declaration(tmp_path, declared)
    assert read_declaration(tmp_path).auditor is None
    assert declare(SPEC, Mine(STARTS)).auditor is None


def test_what_is_declared_is_what_a_job_is_resolved_by(tmp_path: Path) -> None:  # P2
    from parashard_coordinator.run.resolve import resolve

    job = job_from_toml(SMALL_JOB)
    write_declaration(tmp_path, declare_named(job, None))
    elsewhere, here = resolve(job, read_declaration(tmp_path)), resolved_here(job)
    assert (elsewhere.digest, elsewhere.plan, elsewhere.spec) == (here.digest, here.plan, here.spec)


GIVEN = {"mean": np.array([1, 2], np.float32)}


def lost(folder: Path) -> None:
    (folder / VALUES_FILE).unlink()


def other_values(folder: Path) -> None:
    save_file({"given": np.zeros((2, 3), np.float32)}, folder / VALUES_FILE)


def other_shape(folder: Path) -> None:
    save_file({**GIVEN, "given": np.arange(6, dtype=np.float32)}, folder / VALUES_FILE)


def other_dtype(folder: Path) -> None:
    save_file({**GIVEN, "given": np.arange(6.0).reshape(2, 3)}, folder / VALUES_FILE)


def other_name(folder: Path) -> None:
    save_file({**GIVEN, "gone": np.arange(6, dtype=np.float32).reshape(2, 3)}, folder / VALUES_FILE)


def no_record(folder: Path) -> None:
    (folder / RECORD_FILE).unlink()


def one_bit(folder: Path) -> None:
    content = bytearray((folder / RECORD_FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / RECORD_FILE).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lost, "declaration.safetensors: cannot be read as safetensors"),
        (other_values, "these are not the first values that declaration.json is of"),
        (other_shape, r"'given' is float32 \(6,\), which is no variable"),
        (other_dtype, r"'given' is float64 \(2, 3\), which is no variable"),
        (other_name, "'gone' is float32"),
        (no_record, "declaration.json: cannot be read"),
        (one_bit, "not a whole declaration as it was written"),
    ],
)
def test_files_that_are_not_as_they_were_written_are_refused(
    written: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(written)
    with pytest.raises(BadData, match=said):
        read_declaration(written)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    infinite = DeclaredJob(SPEC, {"given": Variable("given", (1,))}, {"given": np.array([np.inf], np.float32)})
    write_declaration(tmp_path, infinite)
    with pytest.raises(BadData, match="'given' are not all finite"):
        read_declaration(tmp_path)


def test_a_variable_that_cannot_be_is_refused(tmp_path: Path) -> None:
    wrong = Variable("drawn", (4,))
    object.__setattr__(wrong, "learning_rate_factor", -1.0)
    write_declaration(tmp_path, DeclaredJob(SPEC, {"drawn": wrong}))
    with pytest.raises(BadData, match="learning_rate_factor"):
        read_declaration(tmp_path)


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ({}, "the model has no variables"),
        ([], "returned list; a model returns a mapping"),
        ({"a": Variable("b", (1,))}, "declares variable 'b' under the name 'a'"),
        ({"a": "text"}, "initial value of 'a' is <U4; due are real numbers"),
        ({"a": [np.nan]}, "initial values of 'a' are not all finite"),
    ],
)
def test_what_a_model_starts_from_is_checked(starts: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        declare(SPEC, Mine(starts))
