"""Variables named PARASHARD_*: none is ignored without a word."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.errors import ConfigurationError
from parashard.job.layers import COMPOSE_VARIABLES, OWN_VARIABLES
from parashard.job.load import load_job
from parashard.launch.programs import RESUME_VARIABLE
from parashard.launch.run_folders import RUNS_VARIABLE
from parashard.process import failpoints
from parashard.process.starts import TLS_VARIABLE, TRACE_VARIABLE

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PARASHARD_JOB_EPOCHS", "PARASHARD_JOB__EPOCHS"),
        ("parashard_job_epochs", "PARASHARD_JOB__EPOCHS"),
        ("PARASHARD_CLUSTER_WORKER_THREADS", "PARASHARD_CLUSTER__WORKER_THREADS"),
        ("PARASHARD_DATA_PATH", "PARASHARD_DATA__PATH"),  # of some sources only
        ("PARASHARD_OPTIMIZER_SCHEDULE_KIND", "PARASHARD_OPTIMIZER__SCHEDULE__KIND"),
    ],
)
def test_a_key_with_one_underscore_is_refused(write_job: Callable[..., Path], name: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load_job(write_job(), (), {name: "5"})
    assert str(error.value) == f"environment {name}: not a key; did you mean {meant}?"


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("PARASHARD_HOME", "environment PARASHARD_HOME: ignored, no such variable"),
        (
            "PARASHARD_TLSDIR",
            "environment PARASHARD_TLSDIR: ignored, no such variable; did you mean PARASHARD_TLS_DIR?",
        ),
        (
            "PARASHARD_EPOCHS",
            "environment PARASHARD_EPOCHS: ignored, no such variable; did you mean PARASHARD_JOB__EPOCHS?",
        ),
        (
            "PARASHARD_WORKERS",
            "environment PARASHARD_WORKERS: ignored, only compose files read it; did you mean "
            "PARASHARD_CLUSTER__WORKERS?",
        ),
    ],
)
def test_another_unknown_one_is_warned_of(write_job: Callable[..., Path], name: str, warning: str) -> None:
    assert load_job(write_job(), (), {name: "5"}).warnings == (warning,)


def test_those_that_are_read_are_not_warned_of(write_job: Callable[..., Path]) -> None:
    names = ["TLS_DIR", "TRACE", "FAILPOINTS", "FAILPOINTS_DIR", "FAILPOINTS_SEED", "IMAGE", "JOB_FOLDER"]
    environ = dict.fromkeys((f"PARASHARD_{name}" for name in names), "5")
    assert load_job(write_job(), (), {**environ, "PARASHARD_JOB__EPOCHS": "5", "OTHER": "1"}).warnings == ()


def test_services_of_kubernetes_are_not_taken_for_keys(write_job: Callable[..., Path]) -> None:
    environ = {
        "PARASHARD_COORDINATOR_SERVICE_HOST": "10.0.0.1",
        "PARASHARD_COORDINATOR_PORT_7000_TCP": "tcp://10.0.0.1",
    }
    assert load_job(write_job(), (), environ).warnings == ()


def test_the_variables_that_are_read_are_known() -> None:
    failpoints_ = (failpoints.SPEC_VARIABLE, failpoints.FOLDER_VARIABLE, failpoints.SEED_VARIABLE)
    assert set(OWN_VARIABLES) == {TLS_VARIABLE, TRACE_VARIABLE, RUNS_VARIABLE, RESUME_VARIABLE, *failpoints_}


def test_the_variables_of_compose_files_are_known() -> None:
    templates = (ROOT / "parashard" / "render" / "templates" / "compose").iterdir()
    files = [*templates, ROOT / "deploy" / "script" / "compose.yaml"]
    found = {name for file in files for name in re.findall(r"\$\{(PARASHARD_\w+)", file.read_text())}
    assert found == set(COMPOSE_VARIABLES)
