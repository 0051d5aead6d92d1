"""What two jobs differ in, as the author of a job file would say it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parashard.data.base import DataSpec
from parashard.job.digest import NAMED_MAX, differences, in_words, job_identity
from parashard.job.load import job_from_toml
from parashard.models.building import build_model

JOB = """
job = {{ name = "j", epochs = {epochs}, batch_size = 8 }}
data = {{ source = "synthetic" }}
model = {{ kind = "mlp", hidden = {hidden} }}
optimizer = {{ kind = "sgd", learning_rate = {rate} }}
"""
SPEC = DataSpec(examples=40, held_out=8, input_shape=(4,), classes=3, fingerprint="ab")


def identity(epochs: int = 2, hidden: str = "[8]", rate: float = 0.1, spec: DataSpec = SPEC, **more: Any) -> Any:
    job = job_from_toml(JOB.format(epochs=epochs, hidden=hidden, rate=rate))
    return job_identity(job, spec, build_model(job.model, spec, 0, None).initial_variables(), **more)


def of(**changed: Any) -> list[str]:
    return differences(identity(), identity(**changed), "in the run", "now")


def test_both_values_of_a_key_are_reported() -> None:
    assert of(epochs=5, rate=0.2) == [
        "job.epochs is 2 in the run, 5 now",
        "optimizer.learning_rate is 0.1 in the run, 0.2 now",
    ]


def test_variables_that_follow_from_the_model_are_left_out() -> None:
    assert of(hidden="[8, 4]") == ["model.hidden is [8] in the run, [8, 4] now"]


def test_what_has_no_key_has_words() -> None:
    other = replace(SPEC, fingerprint="cd")
    assert of(spec=other) == ["the content of the data differs"]
    assert of(spec=replace(other, examples=41)) == ["number of training examples is 40 in the run, 41 now"]
    assert of(model_sha256="ef", epochs=3) == ["job.epochs is 2 in the run, 3 now", "the code of the model differs"]


def test_nothing_differs_in_equal_jobs() -> None:
    assert of() == []
    assert in_words([]) == ""


@pytest.mark.parametrize("more", [0, 1, 60])
def test_many_are_counted(more: int) -> None:
    phrases = [f"key {n}" for n in range(NAMED_MAX + more)]
    assert in_words(phrases) == "; ".join(phrases[:NAMED_MAX]) + (f"; and {more} more" if more else "")
