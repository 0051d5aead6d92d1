from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from parashard.data.base import DataSpec, Field
from parashard.job.digest import changed_keys, identity_digest, job_identity
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.job.schema import Job
from parashard.plan.variables import Initializer, Variable

SPEC = DataSpec(examples=100, held_out=20, input_shape=(4, 4), classes=3, fingerprint="f00d")
VARIABLES = {
    "b": Variable("b", (3,)),
    "a": Variable("a", (16, 3), Initializer("normal", 0.5)),
}

Load = Callable[..., Job]


@pytest.fixture
def load(write_job: Callable[..., Path]) -> Load:
    """Return a function that loads the smallest job with some keys set."""

    def loaded(*sets: str) -> Job:
        policy = [] if any("consistency.policy" in s for s in sets) else ["consistency.policy=async"]
        return load_job(write_job(), [parse_set(s) for s in (*policy, *sets)], {}).job

    return loaded


def job_digest(job: Job, spec: DataSpec, variables: Mapping[str, Variable], **more: str) -> str:
    return identity_digest(job_identity(job, spec, variables, **more))


def test_the_digest_is_stable(load: Load) -> None:
    # A change here makes every run that exists impossible to resume: the release notes must say so.
    job = load("model={kind='mlp', hidden=[8], dropout=0.5}")
    assert job_digest(job, SPEC, VARIABLES) == "91e67b91ddcc197ed06825dd600c67ac5f3820e55c839d2b356f0705b00d9ade"


@pytest.mark.parametrize(
    ("set_key", "changed"),
    [
        ("job.seed=1", ["job.seed"]),
        ("job.epochs=3", ["job.epochs"]),
        ("job.batch_size=9", ["job.batch_size"]),
        ("job.first_epoch=2", ["job.first_epoch"]),
        ("job.steps_per_epoch=2", ["job.steps_per_epoch"]),
        ("job.drop_last=true", ["job.drop_last"]),
        ("job.shuffle=false", ["job.shuffle"]),
        ("job.on_bad_step=skip", ["job.on_bad_step"]),
        ("model={kind='mlp', hidden=[9]}", ["model.activation", "model.dropout", "model.hidden", "model.kind"]),
        ("optimizer.learning_rate=0.2", ["optimizer.learning_rate"]),
        ("optimizer.clip_norm=1", ["optimizer.clip_norm"]),
        ("optimizer.schedule={kind='constant', warmup_steps=1}", ["optimizer.schedule.warmup_steps"]),
        ("consistency.policy=sync:2", ["consistency.policy"]),
        ("consistency.reduce=sum", ["consistency.reduce"]),
    ],
)
def test_what_defines_steps_or_arithmetic_changes_it(load: Load, set_key: str, changed: list[str]) -> None:
    before, after = load(), load(set_key)
    assert changed_keys(job_identity(before, SPEC, VARIABLES), job_identity(after, SPEC, VARIABLES)) == changed
    assert job_digest(before, SPEC, VARIABLES) != job_digest(after, SPEC, VARIABLES)


def test_the_arrays_of_an_example_are_part_of_it(load: Load) -> None:
    named = dataclasses.replace(SPEC, fields=(Field("inputs/ids", (12,), "int64"), Field("targets", (), "int64")))
    assert job_digest(load(), named, VARIABLES) != job_digest(load(), SPEC, VARIABLES)
    fields = job_identity(load(), named, VARIABLES)["data"]["fields"]
    assert fields == "inputs/ids (12) int64; targets () int64"


@pytest.mark.parametrize(
    "set_key",
    [
        "job.name=other",
        "job.max_attempts=7",
        "evaluation={every_epochs=2, target_accuracy=0.5}",
        "variables.a.decay=false",  # counts by what it does to the variables, which are an argument
        "data={source='synthetic', seed=5}",  # counts by its fingerprint, which is an argument
        "data={source='idx', path='elsewhere'}",
        "checkpoint={every_s=1, keep=9}",
        "cluster={shards=9, workers=9, device='cpu', partitioner={kind='whole'}, host='::1', pipeline_depth=0}",
    ],
)
def test_what_does_not_define_them_leaves_it(load: Load, set_key: str) -> None:
    assert job_digest(load(), SPEC, VARIABLES) == job_digest(load(set_key), SPEC, VARIABLES)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"fingerprint": "beef"}, ["data.fingerprint"]),
        ({"examples": 101}, ["data.examples"]),
        ({"held_out": 21}, ["data.held_out"]),
        ({"input_shape": (16,)}, ["data.input_shape"]),
        ({"classes": 4}, ["data.classes"]),
    ],
)
def test_the_data_changes_it(load: Load, change: dict[str, Any], changed: list[str]) -> None:
    other = dataclasses.replace(SPEC, **change)
    assert _changed(load(), SPEC, VARIABLES, other, VARIABLES) == changed


@pytest.mark.parametrize(
    ("more", "changed"), [({"initial_sha256": "ab"}, "initial.sha256"), ({"model_sha256": "cd"}, "code.sha256")]
)
def test_first_values_and_a_users_code_change_it(load: Load, more: dict[str, str], changed: str) -> None:  # P2
    job = load()
    assert job_digest(job, SPEC, VARIABLES, **more) != job_digest(job, SPEC, VARIABLES)
    assert changed_keys(job_identity(job, SPEC, VARIABLES), job_identity(job, SPEC, VARIABLES, **more)) == [changed]


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"shape": (48,)}, ["variables.a.shape"]),
        ({"initializer": Initializer("normal", 0.25)}, ["variables.a.initializer.scale"]),
        ({"initializer": Initializer("uniform", 0.5)}, ["variables.a.initializer.kind"]),
        ({"frozen": True}, ["variables.a.frozen"]),
        ({"decay": False}, ["variables.a.decay"]),
        ({"learning_rate_factor": 0.5}, ["variables.a.learning_rate_factor"]),
        ({"state": "sum"}, ["variables.a.state"]),
        ({"encoding": "int8"}, ["variables.a.encoding"]),  # P2; float32 is not named: older digests stand
    ],
)
def test_the_variables_change_it(load: Load, change: dict[str, Any], changed: list[str]) -> None:
    other = {**VARIABLES, "a": dataclasses.replace(VARIABLES["a"], **change)}
    assert _changed(load(), SPEC, VARIABLES, SPEC, other) == changed


def test_a_variable_less_is_named_by_its_keys(load: Load) -> None:
    without = {"a": VARIABLES["a"]}
    assert "variables.b.shape" in _changed(load(), SPEC, VARIABLES, SPEC, without)


def test_neither_order_nor_number_types_matter(load: Load) -> None:
    other = {"a": dataclasses.replace(VARIABLES["a"], learning_rate_factor=1), "b": VARIABLES["b"]}
    assert job_digest(load(), SPEC, VARIABLES) == job_digest(load(), SPEC, other)


def test_keys_of_a_users_model_count(load: Load) -> None:
    first, second = load("model={kind='mine:build', width=3}"), load("model={kind='mine:build', width=3.0}")
    assert changed_keys(job_identity(first, SPEC, VARIABLES), job_identity(second, SPEC, VARIABLES)) == ["model.width"]
    assert job_digest(first, SPEC, VARIABLES) != job_digest(second, SPEC, VARIABLES)


def _changed(
    job: Job, spec: DataSpec, variables: Mapping[str, Variable], spec_2: DataSpec, variables_2: Mapping[str, Variable]
) -> list[str]:
    assert job_digest(job, spec, variables) != job_digest(job, spec_2, variables_2)
    return changed_keys(job_identity(job, spec, variables), job_identity(job, spec_2, variables_2))
