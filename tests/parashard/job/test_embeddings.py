"""`[tables.NAME]`: what a job file says of embedding tables, what excludes them, and what of them is in the digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.data.base import DataSpec
from parashard.errors import ConfigurationError
from parashard.job.digest import changed_keys, identity_digest, job_identity
from parashard.job.embeddings import identity_of, tables_of
from parashard.job.layers import parse_set
from parashard.job.load import as_toml, describe, job_from_toml, load_job
from parashard.job.schema import Job
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.optimizers import FTRL, SGD, Adagrad
from parashard.plan.variables import Initializer, Variable
from support.small_job import SMALL_JOB
from support.tiers import fewer

SPEC = DataSpec(examples=100, held_out=20, input_shape=(4, 4), classes=3, fingerprint="f00d")
VARIABLES = {"a": Variable("a", (16, 3))}


def job_of(*sets: str) -> Job:
    """Return the smallest job with some keys set."""
    return job_from_toml(SMALL_JOB, [(*parse_set(text)[:2], "--set") for text in sets])


def refusal(write_job: Callable[..., Path], *sets: str, **environ: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_job(write_job(), [parse_set(text) for text in sets], environ)
    return str(error.value)


# --- what is declared ---


def test_a_dimension_is_all_that_a_table_needs() -> None:
    assert tables_of(job_of("tables.user.dimension=4")) == (
        EmbeddingTable("user", 4, Adagrad(learning_rate=0.05), Initializer("uniform", 0.05), 1 << 16, 1 << 26),
    )


def test_with_ftrl_rows_begin_at_zero() -> None:
    (table,) = tables_of(job_of("tables.user={dimension=1, optimizer={kind='ftrl', learning_rate=0.1}}"))
    assert table == EmbeddingTable("user", 1, FTRL(0.1), Initializer())


@pytest.mark.parametrize("kind", ["uniform", "normal", "constant"])
def test_an_initializer_has_its_scale(kind: str) -> None:
    (table,) = tables_of(job_of(f"tables.user={{dimension=4, initializer='{kind}', scale=0.5}}"))
    assert table.initializer == Initializer(kind, 0.5)


def test_zeros_have_no_scale() -> None:
    (table,) = tables_of(job_of("tables.user={dimension=4, initializer='zeros', scale=0.5}"))
    assert table.initializer == Initializer()


def test_tables_come_in_the_order_of_their_names() -> None:
    job = job_of("tables.user={dimension=4, keys_per_step_max=9, rows_max=7}", "tables.item.dimension=2")
    item, user = tables_of(job)
    assert (item.name, item.row_elements) == ("item", 2)
    assert (user.name, user.row_elements, user.keys_per_step_max, user.rows_max) == ("user", 4, 9, 7)


def test_a_job_has_no_tables_unless_it_says_so() -> None:
    assert tables_of(job_of()) == ()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            "optimizer={kind='sgd', learning_rate=0.1, clip_norm=1.0}",
            "user.optimizer.clip_norm: found 1.0; allowed: left out: [optimizer] says it for the whole step",
        ),
        (
            "optimizer={kind='ftrl', learning_rate=0.1}, initializer='normal'",
            'user.initializer: found "normal" with tables.user.optimizer.kind = "ftrl" (flag --set); allowed: zeros '
            "where the optimizer is ftrl, which starts there",
        ),
        (
            "evict_above_rows=200, rows_max=65600",
            "user.evict_above_rows: found 200 with tables.user.rows_max = 65600 (flag --set); allowed: a whole number "
            "from 1 to 64 (rows_max - keys_per_step_max)",
        ),
        (
            "evict_above_rows=200, rows_max=100",
            "user.rows_max: found 100 with tables.user.evict_above_rows = 200 (flag --set); allowed: more than "
            "keys_per_step_max (65,536) where evict_above_rows is set",
        ),
        (
            "evict_norm_below=0.5, dtype='float16'",
            'user.evict_norm_below: found 0.5 with tables.user.dtype = "float16" (flag --set); allowed: 0 where dtype '
            "is float16",
        ),
    ],
)
def test_a_table_that_is_not_possible_is_refused_by_its_keys(
    write_job: Callable[..., Path], table: str, says: str
) -> None:
    assert refusal(write_job, f"tables.user={{dimension=4, {table}}}") == f"flag --set: tables.{says}"


def test_each_table_that_is_not_possible_is_named_with_its_file(write_job: Callable[..., Path]) -> None:
    wrong = "dimension = 4\ninitializer = 'normal'\noptimizer = { kind = 'ftrl', learning_rate = 0.1 }\n"
    file = write_job(SMALL_JOB + f"[tables.user]\n{wrong}[tables.'a.b']\n{wrong}")
    with pytest.raises(ConfigurationError) as error:
        load_job(file, (), {})
    assert [line.split(": found")[0].strip() for line in str(error.value).splitlines()[1:]] == [
        "file job.toml: tables.user.initializer",
        'file job.toml: tables."a.b".initializer',
    ]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("tables.user={}", "tables.user.dimension: missing; needed: Length of a row."),
        ("tables.user.dimension=0", "tables.user.dimension: found 0; allowed: >= 1"),
        ("tables.user.dimension=16385", "tables.user.dimension: found 16385; allowed: <= 16384"),
        ("tables.user=3", "tables.user: found 3; allowed: a table"),
        (
            "tables.user={dimension=4, initializer='ones'}",
            "tables.user.initializer: found \"ones\"; allowed: 'zeros', 'constant', 'uniform' or 'normal'",
        ),
        ("tables.user={dimension=4, scale=inf}", "tables.user.scale: found Infinity; allowed: a finite number"),
        ("tables.user={dimension=4, rows_max=0}", "tables.user.rows_max: found 0; allowed: >= 1"),
        ("tables.user={dimension=4, keys_per_step_max=0}", "tables.user.keys_per_step_max: found 0; allowed: >= 1"),
        ("tables.user={dimension=4, admit_after=0}", "tables.user.admit_after: found 0; allowed: >= 1"),
        ("tables.user={dimension=4, admit_probability=0.0}", "tables.user.admit_probability: found 0.0; allowed: > 0"),
        ("tables.user={dimension=4, evict_unused_steps=0}", "tables.user.evict_unused_steps: found 0; allowed: >= 1"),
        (
            "tables.user={dimension=4, evict_norm_below=nan}",
            "tables.user.evict_norm_below: found NaN; allowed: a finite number",
        ),
        ("tables.user={dimension=4, evict_above_rows=0}", "tables.user.evict_above_rows: found 0; allowed: >= 1"),
        (
            "tables.user={dimension=4, dimensions=4}",
            "tables.user.dimensions: unknown key; did you mean tables.user.dimension?",
        ),
    ],
)
def test_a_wrong_key_of_a_table_is_named(write_job: Callable[..., Path], key: str, message: str) -> None:
    assert refusal(write_job, key) == f"flag --set: {message}"


OPTIMIZERS = st.sampled_from(
    [
        {"kind": "sgd", "learning_rate": 0.5, "weight_decay": 0.25},
        {"kind": "momentum", "learning_rate": 0.5, "momentum": 0.75},
        {"kind": "adagrad", "learning_rate": 1e-9, "clip_value": 2.0},
        {"kind": "ftrl", "learning_rate": 0.1, "l1": 0.5, "schedule": {"kind": "cosine"}},
    ]
)
SETTINGS = st.fixed_dictionaries(
    {"dimension": st.integers(1, 16384)},
    optional={
        "initializer": st.sampled_from(["zeros", "constant", "uniform", "normal"]),
        "scale": st.floats(-1e15, 1e15),
        "optimizer": OPTIMIZERS,
        "keys_per_step_max": st.integers(1, 1 << 24),
        "rows_max": st.integers(1, (1 << 32) - 2),
    },
).filter(lambda said: "initializer" not in said or said.get("optimizer", {}).get("kind") != "ftrl")


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=50), SETTINGS)
)
@fewer(2)
def test_what_is_written_as_toml_is_read_again(tables: dict[str, Any]) -> None:
    job = job_from_toml(SMALL_JOB, [("tables", tables, "--set")])
    assert job.tables.keys() == tables.keys()
    again = job_from_toml(as_toml(job))
    assert again == job
    assert identity_of(again.tables) == identity_of(job.tables)


def test_every_key_of_a_table_has_its_origin(write_job: Callable[..., Path]) -> None:
    file = write_job(SMALL_JOB + "[tables.user]\ndimension = 4\n")
    rows = describe(load_job(file, [parse_set("tables.user.optimizer={kind='sgd', learning_rate=0.1}")], {}))
    assert ("tables.user.dimension", 4, "file job.toml") in rows
    assert ("tables.user.optimizer.kind", "sgd", "flag --set") in rows
    assert ("tables.user.rows_max", 1 << 26, "default") in rows


# --- what excludes tables ---

TABLE = "tables.user.dimension=4"


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (
            ["cluster.shard_device=cuda"],
            ['cluster.shard_device: found "cuda" with tables = ', 'allowed: "cpu" with tables: rows lie in the host'],
        ),
    ],
)
def test_keys_that_exclude_tables(write_job: Callable[..., Path], sets: list[str], says: list[str]) -> None:
    said = refusal(write_job, TABLE, *sets)
    assert said.startswith(f"flag --set: {says[0]}")
    assert says[1] in said
    load_job(write_job(), [parse_set(text) for text in sets], {})  # without tables they are allowed


RATE = "tables.user={dimension=4, optimizer={kind='sgd', learning_rate=-1.0}}"


def test_a_table_ascends_in_a_ledger_alone(write_job: Callable[..., Path]) -> None:
    assert refusal(write_job, RATE) == (
        'flag --set: tables.user.optimizer.learning_rate: found -1.0 with model.kind = "softmax" (file job.toml); '
        "allowed: > 0"
    )
    (table,) = tables_of(job_of(RATE, "model.kind=row_ledger", "optimizer.learning_rate=-1"))
    assert table.optimizer == SGD(-1.0)


def test_each_table_that_ascends_is_named(write_job: Callable[..., Path]) -> None:
    lines = refusal(write_job, RATE, RATE.replace("user", '"a.b"'), "optimizer.learning_rate=-1").splitlines()
    assert [line.split(": ")[1] for line in lines[1:]] == [
        "optimizer.learning_rate",
        "tables.user.optimizer.learning_rate",
        'tables."a.b".optimizer.learning_rate',
    ]


@pytest.mark.parametrize(
    "name", ["PARASHARD_TABLES__X__DIMENSION", "PARASHARD_TABLES__X", "parashard_tables__x__rows_max"]
)
def test_the_environment_says_nothing_of_tables(write_job: Callable[..., Path], name: str) -> None:
    assert refusal(write_job, **{name: "4"}) == (
        f"environment {name}: settings of tables come from the job file or from --set, not from the environment"
    )


def test_a_variable_that_looks_like_a_table_s_is_warned_of(write_job: Callable[..., Path]) -> None:
    name = "PARASHARD_TABLES_X_DIMENSION"
    assert load_job(write_job(), (), {name: "4"}).warnings == (f"environment {name}: ignored, no such variable",)


# --- identity ---


def identity(*sets: str) -> dict[str, Any]:
    return job_identity(job_of("consistency.policy=async", *sets), SPEC, VARIABLES)


def test_a_job_without_tables_keeps_its_digest() -> None:
    assert "tables" not in identity()
    assert identity_digest(identity()) == "227e696724bcab56e0fe678566a5f4721d1aa9527d1ea965eb6451b1b8427042"


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        ("dimension=5", ["tables.user.dimension"]),
        ("dimension=4, initializer='normal'", ["tables.user.initializer"]),
        ("dimension=4, scale=0.5", ["tables.user.scale"]),
        ("dimension=4, combiner='sum'", ["tables.user.combiner"]),
        ("dimension=4, encoding='int8'", ["tables.user.encoding"]),
        ("dimension=4, optimizer={kind='adagrad', learning_rate=0.5}", ["tables.user.optimizer.learning_rate"]),
    ],
)
def test_what_decides_the_arithmetic_of_rows_is_in_the_digest(more: str, changed: list[str]) -> None:  # P2
    before, after = identity(TABLE), identity(f"tables.user={{{more}}}")
    assert changed_keys(before, after) == changed
    assert identity_digest(before) != identity_digest(after)


def test_an_encoding_that_a_row_is_too_short_for_does_not_define_the_job() -> None:
    assert identity("tables.user.dimension=1") == identity("tables.user={dimension=1, encoding='int8'}")
    assert identity(TABLE) == identity("tables.user={dimension=4, encoding='float32'}")


def test_so_are_the_names_of_tables() -> None:
    renamed = identity("tables.item.dimension=4")
    assert identity_digest(identity(TABLE)) not in {identity_digest(renamed), identity_digest(identity())}
    assert "tables.item.dimension" in changed_keys(identity(TABLE), renamed)


def test_the_combiner_that_is_the_default_is_not() -> None:
    assert identity(TABLE) == identity("tables.user={dimension=4, combiner='mean'}")


@pytest.mark.parametrize("bound", ["keys_per_step_max=5", "rows_max=5", "keys_per_step_max=5, rows_max=5"])
def test_bounds_are_not(bound: str) -> None:
    assert identity(TABLE) == identity(f"tables.user={{dimension=4, {bound}}}")


def test_the_order_of_tables_is_not() -> None:
    there, back = identity(TABLE, "tables.item.dimension=2"), identity("tables.item.dimension=2", TABLE)
    assert identity_digest(there) == identity_digest(back)


ROUNDS = "consistency.policy=sync:8"
BOUNDED = "tables.user={dimension=4, keys_per_step_max=32, rows_max=150, evict_above_rows=100}"


def test_a_round_s_keys_have_room_beside_the_rows_that_stay(write_job: Callable[..., Path]) -> None:
    said = refusal(write_job, BOUNDED, ROUNDS)
    assert said.startswith('flag --set: tables.user.rows_max: found 150 with consistency.policy = "sync:8"')
    assert "allowed: >= 356 (evict_above_rows and keys_per_step_max of each of 8 steps of a round)" in said
    load_job(write_job(), [parse_set(text) for text in (BOUNDED, "consistency.policy=async")], {})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("dtype='float16'", 'tables.ledger.dtype: found "float16"'),
        ("combiner='sum'", 'tables.ledger.combiner: found "sum"'),
        ("encoding='int8'", 'tables.ledger.encoding: found "int8"'),
        ("initializer='normal'", 'tables.ledger.initializer: found "normal"'),
        ("evict_above_rows=10", "tables.ledger.evict_above_rows: found 10"),
    ],
)
def test_the_ledger_of_rows_refuses_what_it_could_not_count(
    write_job: Callable[..., Path], change: str, says: str
) -> None:
    table = f"tables.ledger={{dimension=2, {change}}}"
    assert says in refusal(write_job, "model.kind=row_ledger", table, "consistency.policy=sync:4")


@pytest.mark.parametrize(
    ("rule", "other"), [("evict_norm_every=7", "evict_norm_below"), ("evict_first='lfu'", "evict_above_rows")]
)
def test_a_rule_that_decides_nothing_is_refused(write_job: Callable[..., Path], rule: str, other: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{rule[:7]}.*left out where {other} is not set"):
        load_job(write_job(), [parse_set(f"tables.user={{dimension=4, {rule}}}")], {})
