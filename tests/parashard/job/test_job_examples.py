"""The job files that users start from are valid, and their data, models and settings go together."""

from pathlib import Path

import numpy as np
import pytest

from parashard.data import open_source
from parashard.data.generated import ClicksSource, true_auc
from parashard.data.options import ClicksOptions
from parashard.errors import ConfigurationError
from parashard.job.embeddings import tables_of
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.job.schema import apply_settings
from parashard.models.building import build_model
from parashard.plan.variables import Variable
from support.click_cases import criteo_log

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
IDX_STAND_IN = "data={source='synthetic', examples=100, features=784, classes=10}"  # MNIST's files are not in the tree


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        *((name, []) for name in ("clicks", "digits", "films", "ledger", "row_ledger", "torn")),
        ("mnist", [IDX_STAND_IN]),
    ],
)
def test_an_example_resolves(name: str, sets: list[str]) -> None:
    job = load_job(EXAMPLES / f"{name}.toml", [parse_set(s) for s in sets], {}).job
    assert job.job.name == name.replace("_", "-")
    spec = open_source(job.data).spec
    model = build_model(job.model, spec, job.job.seed, EXAMPLES, tables_of(job))
    variables = {n: v for n, v in model.initial_variables().items() if isinstance(v, Variable)}
    apply_settings(variables, job.variables)


def test_mnist_lies_beside_its_file_unless_a_flag_says_where() -> None:
    job = load_job(EXAMPLES / "mnist.toml", environ={}).job
    assert job.data.path == EXAMPLES / "mnist"  # type: ignore[union-attr]


def test_only_the_oracles_name_a_policy() -> None:
    named = {file.stem for file in EXAMPLES.glob("*.toml") if "[consistency]" in file.read_text()}
    assert named == {"ledger", "row_ledger", "torn"}


@pytest.mark.parametrize("name", ["ledger", "row_ledger"])
def test_a_ledger_counts_in_every_policy(name: str) -> None:
    for policy in ("auto", "async", "ssp:4", "sync:4"):
        job = load_job(EXAMPLES / f"{name}.toml", [parse_set(f"consistency.policy={policy}")], {}).job
        assert (job.optimizer.learning_rate, job.consistency.reduce) == (-1, "sum")
        assert [table.optimizer.learning_rate for table in tables_of(job)] == [-1] * len(job.tables)


def test_criteo_s_log_resolves_with_every_model_of_tables(tmp_path: Path) -> None:
    log = criteo_log(tmp_path / "train.txt", 100)
    for kind in ("deepfm", "wide_deep", "fm", "dlrm"):
        sets = [parse_set(f"data.path={log}"), parse_set(f"model.kind={kind}")]
        job = load_job(EXAMPLES / "criteo.toml", sets, {}).job
        spec = open_source(job.data).spec
        assert (spec.examples, spec.held_out) == (90, 10)
        build_model(job.model, spec, job.job.seed, EXAMPLES, tables_of(job))


def test_criteo_s_log_lies_beside_its_file_unless_a_flag_says_where() -> None:
    job = load_job(EXAMPLES / "criteo.toml", environ={}).job
    assert job.data.path == EXAMPLES / "criteo" / "train.txt"  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "columns"), [("criteo", 26), ("clicks", 26), ("adult", 8)])
def test_a_step_of_an_example_may_use_a_key_for_each_of_its_cells(name: str, columns: int) -> None:
    job = load_job(EXAMPLES / f"{name}.toml", environ={}).job
    assert {table.keys_per_step_max >= job.job.batch_size * columns for table in tables_of(job)} == {True}


def test_the_best_auc_of_the_synthetic_log_is_what_its_file_says() -> None:
    options = load_job(EXAMPLES / "clicks.toml", environ={}).job.data
    assert isinstance(options, ClicksOptions)
    assert f"is {true_auc(ClicksSource(options)):.3f};" in (EXAMPLES / "clicks.toml").read_text()


def test_adult_is_read_as_its_file_says(tmp_path: Path) -> None:
    person = (
        "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Not-in-family, White, Male, 2174, 0, {}, Cuba, {}\n"
    )
    (tmp_path / "adult.data").write_text(person.format(40, "<=50K") + person.format(50, ">50K"))
    (tmp_path / "adult.test").write_text("|1x3 Cross validator\n" + person.format(45, ">50K."))
    job = load_job(EXAMPLES / "adult.toml", [parse_set(f"data.path={tmp_path}")], {}).job
    source = open_source(job.data)
    assert source.spec.summary() == (
        "2 training rows, 1 held out; 5 numeric and 8 text columns as inputs numbers (5) float32, keys (8) int64; "
        "8 texts hashed to 8 keys (chance of a collision 2e-18); missing cells 3; 2 classes of income (<=50K, >50K)"
    )
    inputs, targets = source.held_out(0, 1)
    assert targets.tolist() == [1]
    np.testing.assert_array_equal(inputs["keys"], source.examples(np.array([0]))[0]["keys"])
    model = build_model(job.model, source.spec, job.job.seed, EXAMPLES, tables_of(job))
    assert model.initial_variables()["dense_0.weight"].shape == (5 + 8 * 8, 64)


def test_a_list_where_text_is_due_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"data\.missing: found \[\[\]\]; allowed: text"):
        load_job(EXAMPLES / "adult.toml", [parse_set("data.missing=[[]]")], {})
