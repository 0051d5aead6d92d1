"""Another kind of a table by a flag or the environment: keys that only the earlier kind had go with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parashard.errors import ConfigurationError
from parashard.job.layers import parse_set
from parashard.job.load import load_job

Write = Callable[..., Path]


@pytest.fixture
def npz(write_job: Write, minimal: str) -> Path:
    """Return a job file whose data have keys that other sources lack."""
    return write_job(minimal.replace('source = "synthetic"', 'source = "npz"\npath = "mnist"\nheld_out = 0.1'))


def loaded(file: Path, *sets: str, environ: dict[str, str] | None = None) -> Any:
    return load_job(file, [parse_set(text) for text in sets], environ or {})


def test_keys_of_the_file_s_source_go_and_shared_ones_stay(npz: Path) -> None:
    found = loaded(npz, "data.source=digits")
    assert (found.job.data.source, found.job.data.held_out) == ("digits", 0.1)
    assert "data.path" not in found.origins
    assert found.origins["data.held_out"] == "file job.toml"


def test_a_key_that_both_have_stays(npz: Path) -> None:
    assert loaded(npz, "data.source=csv", "data.label=kind").job.data.path.name == "mnist"


def test_the_environment_switches_as_a_flag_does(npz: Path) -> None:
    assert loaded(npz, environ={"PARASHARD_DATA__SOURCE": "digits"}).job.data.source == "digits"


def test_what_comes_with_the_switch_is_checked(npz: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"flag --set: data.path: unknown key"):
        loaded(npz, "data.source=digits", "data.path=mnist")
    environ = {"PARASHARD_DATA__PATH": "mnist", "PARASHARD_DATA__SOURCE": "digits"}
    with pytest.raises(ConfigurationError, match=r"environment PARASHARD_DATA__PATH: data.path: unknown key"):
        loaded(npz, environ=environ)


def test_a_key_that_no_kind_has_is_still_an_error(write_job: Write, minimal: str) -> None:
    file = write_job(minimal.replace('source = "synthetic"', 'source = "npz"\npath = "mnist"\nheld_aut = 0.1'))
    with pytest.raises(ConfigurationError, match=r"file job.toml: data.held_aut: unknown key; did you mean"):
        loaded(file, "data.source=digits")


def test_the_same_kind_again_is_no_switch(npz: Path) -> None:
    assert loaded(npz, "data.source=npz").job.data.path.name == "mnist"


def test_the_last_of_several_switches_counts(npz: Path) -> None:
    environ = {"PARASHARD_DATA__SOURCE": "synthetic", "PARASHARD_DATA__FEATURES": "3"}
    assert loaded(npz, "data.source=digits", environ=environ).job.data.source == "digits"


def test_tables_within_tables_switch_too(write_job: Write, minimal: str) -> None:
    schedule = 'learning_rate = 0.1\nschedule = { kind = "cosine", final_fraction = 0.1, warmup_steps = 3 }'
    file = write_job(minimal.replace("learning_rate = 0.1", schedule))
    found = loaded(file, "optimizer.schedule.kind=constant").job.optimizer.schedule
    assert (found.kind, found.warmup_steps) == ("constant", 3)


def test_a_table_that_is_left_out_has_its_default_kind(write_job: Write, minimal: str) -> None:
    file = write_job(minimal + "\n[cluster]\npartitioner = { min_bytes = 8 }\n")
    with pytest.raises(ConfigurationError, match=r"partitioner"):
        loaded(file)  # as it was: the file itself has no kind
    file = write_job(minimal + '\n[cluster]\npartitioner = { kind = "minimum-size", min_bytes = 8 }\n')
    assert loaded(file, "cluster.partitioner.kind=whole").job.cluster.partitioner.kind == "whole"


@pytest.mark.parametrize(
    ("model", "switch", "options"),
    [
        ('kind = "mlp"\nhidden = [8]', "mine:build", {}),
        ('kind = "mine:build"\nwidth = 3', "softmax", {}),
        ('kind = "mine:build"\nwidth = 3', "mine:build_old", {"width": 3}),
    ],
    ids=["to a user's own", "from a user's own", "between a user's own"],
)
def test_a_user_s_model_has_no_options_of_a_built_in_one(
    write_job: Write, minimal: str, model: str, switch: str, options: dict[str, int]
) -> None:
    found = loaded(write_job(minimal.replace('kind = "softmax"', model)), f"model.kind={switch}").job.model
    assert (found.kind, found.model_extra or {}) == (switch, options)
