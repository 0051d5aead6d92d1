"""The job files that users start from are valid, and their data, models and settings go together."""

from pathlib import Path

import pytest

from parashard.data import open_source
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.job.settings import apply_settings
from parashard.models import build_model
from parashard.plan.variables import Variable

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
IDX_STAND_IN = "data={source='synthetic', examples=100, features=784, classes=10}"  # MNIST's files are not in the tree


@pytest.mark.parametrize(("name", "sets"), [("digits", []), ("ledger", []), ("torn", []), ("mnist", [IDX_STAND_IN])])
def test_an_example_resolves(name: str, sets: list[str]) -> None:
    job = load_job(EXAMPLES / f"{name}.toml", [parse_set(s) for s in sets], {}).job
    assert job.job.name == name
    spec = open_source(job.data).spec
    model = build_model(job.model, spec, job.job.seed, EXAMPLES)
    variables = {n: v for n, v in model.initial_variables().items() if isinstance(v, Variable)}
    apply_settings(variables, job.variables)


def test_mnist_lies_beside_its_file_unless_a_flag_says_where() -> None:
    job = load_job(EXAMPLES / "mnist.toml", environ={}).job
    assert job.data.path == EXAMPLES / "mnist"  # type: ignore[union-attr]


def test_the_ledger_counts_in_every_policy() -> None:
    for policy in ("async", "ssp:4", "sync:4"):
        job = load_job(EXAMPLES / "ledger.toml", [parse_set(f"consistency.policy={policy}")], {}).job
        assert (job.optimizer.learning_rate, job.consistency.reduce) == (-1, "sum")


def test_adult_is_read_as_its_file_says(tmp_path: Path) -> None:
    person = (
        "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Not-in-family, White, Male, 2174, 0, {}, Cuba, {}\n"
    )
    (tmp_path / "adult.data").write_text(person.format(40, "<=50K") + person.format(50, ">50K"))
    (tmp_path / "adult.test").write_text("|1x3 Cross validator\n" + person.format(45, ">50K."))
    sets = [f"data.path={tmp_path}/adult.data", f"data.held_out_path={tmp_path}/adult.test"]
    job = load_job(EXAMPLES / "adult.toml", [parse_set(s) for s in sets], {}).job
    source = open_source(job.data)
    assert source.spec.summary() == (
        "2 training rows, 1 held out; 5 numeric and 8 text columns as 13 inputs; 2 classes of income (<=50K, >50K)"
    )
    assert source.held_out(0, 1)[1].tolist() == [1]
