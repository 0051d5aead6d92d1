from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parashard.errors import ConfigurationError
from parashard.job.layers import forms_in, parse_set
from parashard.job.load import as_toml, describe, job_from_toml, load_job
from parashard.job.policy import Policy
from parashard.job.schema import Job

WriteJob = Callable[..., Path]


def test_only_what_is_required(write_job: WriteJob) -> None:
    job = load_job(write_job(), environ={}).job
    assert (job.job.name, job.job.epochs, job.job.batch_size, job.job.seed) == ("small", 2, 8, 0)
    assert job.consistency.policy == Policy("auto", 2)
    assert job.cluster.partitioner.kind == "minimum-size"
    assert job.variables == {}


def test_every_key_has_one_of_the_four_origins(write_job: WriteJob) -> None:
    loaded = load_job(write_job(), [("cluster.shards", 4, "--shards")], {"PARASHARD_CLUSTER__WORKERS": "3"})
    assert (loaded.job.cluster.shards, loaded.job.cluster.workers) == (4, 3)
    assert loaded.origins["cluster.shards"] == "flag --shards"
    assert loaded.origins["cluster.workers"] == "environment PARASHARD_CLUSTER__WORKERS"
    assert loaded.origins["job.epochs"] == "file job.toml"
    assert loaded.origins["cluster.lease_ttl_s"] == "default"
    assert loaded.path == Path.cwd() / "job.toml"


def test_the_environment_is_the_processes_own_by_default(write_job: WriteJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARASHARD_JOB__SEED", "7")
    assert load_job(write_job()).job.job.seed == 7


def test_describe_has_every_key_in_order(write_job: WriteJob) -> None:
    loaded = load_job(write_job(), [parse_set('variables."*.bias".decay=false')], {})
    rows = describe(loaded)
    assert rows[0] == ("job.name", "small", "file job.toml")
    assert ("evaluation.target_loss", None, "default") in rows
    assert ('variables."*.bias".decay', False, "flag --set") in rows
    assert ("consistency.policy", "auto:2", "default") in rows
    assert [key for key, _, _ in rows] == list(loaded.origins)


@pytest.mark.parametrize(
    ("layer", "path", "expected"),
    [
        ("file", "mnist", "{jobs}/mnist"),
        ("file", "../mnist", "{cwd}/mnist"),
        ("file", "/srv/mnist", "/srv/mnist"),
        ("file", "~/mnist", "{home}/mnist"),
        ("flag", "mnist", "{cwd}/mnist"),
        ("flag", "~/mnist", "{home}/mnist"),
        ("environment", "mnist", "{cwd}/mnist"),
        ("environment", "/srv/mnist", "/srv/mnist"),
    ],
)
def test_what_a_path_is_relative_to(
    write_job: WriteJob, minimal: str, monkeypatch: pytest.MonkeyPatch, layer: str, path: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd() / "home"))
    in_file = path if layer == "file" else "from-the-file"
    text = minimal.replace('source = "synthetic"', f'source = "idx"\npath = "{in_file}"')
    file = write_job(text)
    Path("jobs").mkdir()
    file = file.rename("jobs/job.toml")
    overrides = [("data.path", path, "--data")] if layer == "flag" else []
    environ = {"PARASHARD_DATA__PATH": path} if layer == "environment" else {}
    found = load_job(file, overrides, environ).job.data.path  # type: ignore[union-attr]
    assert str(found) == expected.format(cwd=Path.cwd(), jobs=Path.cwd() / "jobs", home=Path.cwd() / "home")


def test_a_host_file_is_relative_to_where_it_is_said(write_job: WriteJob, minimal: str) -> None:
    file = write_job(f'{minimal}\n[cluster]\nlauncher = "ssh:hosts"\n')
    job = load_job(file, environ={}).job
    assert job.cluster.launcher == f"ssh:{file.absolute().parent / 'hosts'}"
    assert job_from_toml(as_toml(job)) == job
    said = load_job(file, [("cluster.launcher", "ssh:mine", "--on")], environ={}).job
    assert said.cluster.launcher == f"ssh:{Path.cwd() / 'mine'}"


def test_each_path_of_a_table_of_paths_is_relative_to_where_it_is_said(write_job: WriteJob, minimal: str) -> None:
    table = 'source = "csv"\npath = "a.csv"\nlabel = "y"\nvocabularies = { "a.b" = "b.txt", c = "/c.txt" }'
    file = write_job(minimal.replace('source = "synthetic"', table))
    Path("jobs").mkdir()
    file = file.rename("jobs/job.toml")
    loaded = load_job(file, [parse_set("data.vocabularies.d=d.txt")], {})
    here = Path.cwd()
    due = {"a.b": here / "jobs" / "b.txt", "c": Path("/c.txt"), "d": here / "d.txt"}
    assert loaded.job.data.vocabularies == due  # type: ignore[union-attr]
    assert loaded.origins["data.vocabularies.d"] == "flag --set"
    assert job_from_toml(as_toml(loaded.job)) == loaded.job
    environ = {"PARASHARD_DATA__VOCABULARIES__C": "e.txt"}
    assert load_job(file, (), environ).job.data.vocabularies["c"] == here / "e.txt"  # type: ignore[union-attr]


def test_the_home_of_an_unknown_user(write_job: WriteJob) -> None:
    with pytest.raises(ConfigurationError) as error:
        load_job(write_job(), [parse_set("data={source='idx', path='~no-such-user-here/x'}")], {})
    assert str(error.value) == (
        'flag --set: data.path: found "~no-such-user-here/x"; allowed: a path whose ~ names a user with a home folder'
    )


def test_a_folder_whose_name_is_no_text(write_job: WriteJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path / "d_") + b"\xe9"))
    folder.mkdir()
    job = write_job().absolute()
    with pytest.raises(
        ConfigurationError, match=r'file "job.toml": the path b.*d_\\xe9/job.toml. is not text in UTF-8'
    ):
        load_job(Path(shutil.copy(job, folder / "job.toml")), (), {})
    monkeypatch.chdir(folder)
    for text in ("data={source='idx', path='x'}", "checkpoint.url='x'"):
        key = text.replace("={source='idx', ", ".").partition("=")[0]
        with pytest.raises(ConfigurationError, match=rf"flag --set: {key}: the path b'.*d_\\xe9/x' is not text in UTF"):
            load_job(job, [parse_set(text)], {})


def test_a_file_that_is_not_there(write_job: WriteJob) -> None:
    write_job()
    assert _refusal("other.toml") == "job file other.toml: there is no such file"
    Path("folder").mkdir()
    assert _refusal("folder") == "job file folder: this is a folder; a job is one TOML file"
    assert _refusal("job.toml/x") == "job file job.toml/x: cannot be read: Not a directory"


def test_a_file_that_is_no_toml(write_job: WriteJob) -> None:
    write_job('[job]\nname = "x"\nepochs 3\n')
    assert _refusal("job.toml") == (
        "job file job.toml: not TOML: Expected '=' after a key in a key/value pair (at line 3, column 8)"
    )
    write_job("x = " + "[" * 5000)
    assert _refusal("job.toml").startswith("job file job.toml: not TOML: ")
    write_job("x = " + "9" * 5000)
    assert _refusal("job.toml").startswith("job file job.toml: not TOML: ")
    Path("job.toml").write_bytes(b'name = "\xff"')
    assert _refusal("job.toml") == ("job file job.toml: found the byte 0xff at offset 8; allowed: text in UTF-8")


def test_an_environment_that_is_no_text(write_job: WriteJob) -> None:
    write_job()
    broken = b"\xff".decode("utf-8", "surrogateescape")
    assert _refusal("job.toml", {"PARASHARD_JOB__NAME": broken}) == (
        "environment PARASHARD_JOB__NAME: 'job.name': not text in UTF-8"
    )


TABLES = [
    [],
    ["data={source='idx', path='x'}", "model={kind='mlp', hidden=[7, 5], dropout=0.25}"],
    ["data={source='csv', path='a.csv', columns=['a', 'b'], label='b'}"],
    ["optimizer={kind='adamw', clip_norm=1, schedule={kind='cosine', warmup_steps=3, decay_steps=9}}"],
    ["optimizer={kind='momentum', learning_rate=1, schedule={kind='step', every_steps=5, factor=0.5}}"],
    ['variables."*.bias"={decay=false}', 'variables."a\\"b"={frozen=true, learning_rate_factor=1e-3}'],
    ["consistency={policy='sync:8', reduce='sum'}", "evaluation={every_epochs=0, target_loss=-0.5}"],
    ["consistency={policy='ssp:3'}", "cluster={partitioner={kind='maximum-size', max_bytes=5}, workers=0}"],
    ["model={kind='mine.models:build', width=3, rates=[1, 0.5], name='é\\n', nested={a=true}, most=inf}"],
    ["job.seed=9223372036854775807"],
]


@pytest.mark.parametrize("sets", TABLES, ids=" ".join)
def test_a_written_job_loads_as_the_same_job(write_job: WriteJob, sets: list[str]) -> None:
    job = load_job(write_job(), [parse_set(s) for s in sets], {}).job
    again = load_job(write_job(as_toml(job)), environ={}).job
    assert again == job
    assert as_toml(again) == as_toml(job)
    assert list(again.variables) == list(job.variables)  # later patterns win: their order counts


def test_a_written_job_has_the_keys_of_the_file(write_job: WriteJob) -> None:
    schedule = "optimizer.schedule={kind='step', every_steps=5, factor=0.5}"
    assert "factor = 0.5" in as_toml(load_job(write_job(), [parse_set(schedule)], {}).job)


numbers = st.floats(1e-9, 1e9)


@given(
    st.fixed_dictionaries(
        {
            "cluster": st.fixed_dictionaries(
                {},
                optional={
                    "shards": st.integers(1, 1024),
                    "lease_ttl_s": st.floats(0.1, 3600),
                    "speculate_after": st.floats(0, 1e6),
                    "host": st.sampled_from(["localhost", "::1"]),
                },
            ),
            "optimizer": st.fixed_dictionaries(
                {"kind": st.just("adam")}, optional={"learning_rate": numbers, "clip_value": numbers}
            ),
            "variables": st.dictionaries(
                st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1),
                st.fixed_dictionaries({}, optional={"frozen": st.booleans(), "learning_rate_factor": numbers}),
                max_size=3,
            ),
        }
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_job_survives_its_file(tmp_path: Path, minimal: str, tables: dict[str, Any]) -> None:
    file = tmp_path / "job.toml"
    file.write_text(minimal)
    job = load_job(file, [(name, table, "--set") for name, table in tables.items()], {}).job
    file.write_text(as_toml(job))
    assert load_job(file, environ={}).job == job


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("auto:4", "auto: batches of 8 in 4 parts"),
        ("auto:1", "auto: batches of 8 in 1 part"),
        ("ssp:2", "ssp:2"),
    ],
)
def test_the_consistency_is_told_in_words(write_job: Callable[..., Path], policy: str, text: str) -> None:
    overrides = [("consistency.policy", policy, "--consistency"), ("job.batch_size", 8, "--set")]
    assert load_job(write_job(), overrides, environ={}).job.consistency_in_words == text


def test_every_key_is_described() -> None:
    own = [Job, *(form for field in Job.model_fields.values() for form in forms_in(field.annotation))]
    for table in own:
        for name, field in table.model_fields.items():
            assert (field.description or "").endswith("."), f"{table.__name__}.{name}"


def _refusal(path: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_job(path, environ=environ or {})
    return str(error.value)
