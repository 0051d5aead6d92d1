"""Every kind of mistake in a job, with the exact message that its author sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from parashard.errors import ConfigurationError
from parashard.frozen_model import validated
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.job.schema import Job
from parashard.job.sections import JobOptions

SOURCES = "clicks, criteo, csv, digits, idx, npz, parquet, synthetic"
MODELS = "softmax, mlp, cnn, wide_deep, fm, deepfm, dlrm, module:factory"

# What is set, and the message after its origin.
KEYS = [
    ("job.epochs=0", "job.epochs: found 0; allowed: >= 1"),
    ("job.seed=9223372036854775808", "job.seed: found 9223372036854775808; allowed: <= 9223372036854775807"),
    ("job.epochs=true", "job.epochs: found true; allowed: an integer"),
    ('job.epochs="3"', 'job.epochs: found "3"; allowed: an integer'),
    ("job.epochs=2.0", "job.epochs: found 2.0; allowed: an integer"),
    ("job.epochs=2026-01-01", 'job.epochs: found "2026-01-01"; allowed: an integer'),
    ("job.name=7", "job.name: found 7; allowed: text"),
    (
        "job.name=a b",
        "job.name: found \"a b\"; allowed: 1 to 80 letters, digits, '.', '_' or '-', of which the first is a letter or "
        "a digit",
    ),
    ("job.on_bad_step=retry", "job.on_bad_step: found \"retry\"; allowed: 'stop' or 'skip'"),
    ("job.sed=1", "job.sed: unknown key; did you mean job.seed?"),
    (
        "job.color=1",
        "job.color: unknown key; allowed: name, seed, epochs, first_epoch, updates_before, passes_before, "
        "batch_size, steps_per_epoch, drop_last, shuffle, max_attempts, on_bad_step",
    ),
    (
        "job={name='x', epochs=1}",
        "job.batch_size: missing; needed: Examples of one update; in sync:N of each of its N steps.",
    ),
    ("job=3", "job: found 3; allowed: a table"),
    (
        "storage.every_s=60",
        "storage: unknown key; allowed: job, data, model, optimizer, variables, tables, consistency, evaluation, "
        "checkpoint, cluster",
    ),
    ("data.source=digts", f'data.source: found "digts"; allowed: {SOURCES}'),
    ("data={}", f"data.source: missing; allowed: {SOURCES}"),
    ("data=[]", "data: found []; allowed: a table"),
    ("data.exampels=3", "data.exampels: unknown key; did you mean data.examples?"),
    ("model.kind=mpl", f'model.kind: found "mpl"; allowed: {MODELS}'),
    ("model.kind=3", f"model.kind: found 3; allowed: {MODELS}"),
    *(
        (
            f"model.kind={kind}",
            f'model.kind: found "{kind}"; allowed: module:factory, such as line:build: a Python module, '
            "a colon and a function in it",
        )
        for kind in ("mlp:", ":build", "a:b:c", "my-model:build", "1:2")
    ),
    ("model={}", f"model.kind: missing; allowed: {MODELS}"),
    ("model={kind='mlp', hidden=[64, 'x']}", 'model.hidden.1: found "x"; allowed: an integer'),
    ("model={kind='mlp', hidden=64}", "model.hidden: found 64; allowed: a list"),
    ("model={kind='mlp', hiden=[64]}", "model.hiden: unknown key; did you mean model.hidden?"),
    (
        "optimizer={kind='momentum', learning_rate=1, momentun=0}",
        "optimizer.momentun: unknown key; did you mean optimizer.momentum?",
    ),
    ("optimizer.learning_rate=inf", "optimizer.learning_rate: found Infinity; allowed: a finite number"),
    (
        "optimizer.schedule.kind=linear",
        'optimizer.schedule.kind: found "linear"; allowed: constant, step, exponential, cosine, '
        "cosine_restarts, polynomial, piecewise",
    ),
    (
        "optimizer.schedule={kind='cosine', final_fraction=2}",
        "optimizer.schedule.final_fraction: found 2; allowed: <= 1",
    ),
    (
        "optimizer.schedule={kind='step', every_steps=1, factor=1, factr=1}",
        "optimizer.schedule.factr: unknown key; did you mean optimizer.schedule.factor?",
    ),
    ('optimizer.learning_rate="0.1"', 'optimizer.learning_rate: found "0.1"; allowed: a number'),
    ('data.features="5"', 'data.features: found "5"; allowed: an integer'),
    (
        "data={source='synthetic', features=1048576, classes=1000}",
        'data: found {"source": "synthetic", "features": 1048576, "classes": 1000}; allowed: classes * features '
        "must be at most 16777216",
    ),
    ('variables."*.bias"=3', 'variables."*.bias": found 3; allowed: a table'),
    (
        'variables."*.bias".lr=3',
        'variables."*.bias".lr: unknown key; allowed: frozen, decay, learning_rate_factor, encoding',
    ),
    (
        "variables.dense_0.bias={frozen = true}",
        'variables.dense_0.bias: unknown key; a pattern with a dot needs quotes: variables."dense_0.bias"',
    ),
    (
        'variables."*".encoding=topk:0.5',
        'variables."*".encoding: found "topk:0.5"; allowed: float32, bfloat16, float16, int8, or topk:FRACTION with '
        "0 < FRACTION < 0.5",
    ),
    ('variables."*".encoding=8', 'variables."*".encoding: found 8; allowed: text'),
    ('variables."*".learning_rate_factor=-1', 'variables."*".learning_rate_factor: found -1; allowed: >= 0'),
    (
        "consistency.policy=ssp:x",
        'consistency.policy: found "ssp:x"; allowed: auto, async, ssp:K with 0 <= K < 10^9, or sync:N with 1 <= N '
        "< 10^9",
    ),
    (
        "consistency.policy=3",
        "consistency.policy: found 3; allowed: auto, async, ssp:K with 0 <= K < 10^9, or sync:N with 1 <= N < 10^9",
    ),
    ("evaluation.target_accuracy=0", "evaluation.target_accuracy: found 0; allowed: > 0"),
    ("evaluation.target_loss=low", 'evaluation.target_loss: found "low"; allowed: a number'),
    ("cluster.lease_ttl_s=0.05", "cluster.lease_ttl_s: found 0.05; allowed: >= 0.1"),
    ("cluster.insecure=1", "cluster.insecure: found 1; allowed: true or false"),
    ("cluster.device=gpu", 'cluster.device: found "gpu"; allowed: auto, cpu, cuda, or cuda:N with 0 <= N < 100'),
    (
        "cluster.shard_device=auto",
        'cluster.shard_device: found "auto"; allowed: cpu, cuda, or cuda:N with 0 <= N < 100',
    ),
    (
        "cluster.shard_device=cuda:x",
        'cluster.shard_device: found "cuda:x"; allowed: cpu, cuda, or cuda:N with 0 <= N < 100',
    ),
    (
        "cluster.partitioner={kind='maximum-size'}",
        "cluster.partitioner.max_bytes: missing; needed: Largest range, in bytes.",
    ),
    (
        "cluster.partitioner.kind=halves",
        'cluster.partitioner.kind: found "halves"; allowed: minimum-size, fixed-shards, maximum-size, whole',
    ),
]

REMOVED = 'it was removed, because measurements show that it does not keep accuracy; use consistency "auto"'
KEYS += [
    ("optimizer.staleness_damping=inverse", f'optimizer.staleness_damping: found "inverse"; {REMOVED}'),
    ("optimizer.delay_compensation=0.5", f"optimizer.delay_compensation: found 0.5; {REMOVED}"),
    (
        "tables.user={dimension=4, optimizer={kind='sgd', learning_rate=1.0, delay_compensation=0.5}}",
        f"tables.user.optimizer.delay_compensation: found 0.5; {REMOVED}",
    ),
]

NO_LOG = "the log of pushes was removed; leave the key out, and set a shorter checkpoint.every_s to compute less again"
KEYS += [
    ("checkpoint.durability=log", f'checkpoint.durability: found "log"; {NO_LOG}'),
    ("checkpoint.durability=disk", f'checkpoint.durability: found "disk"; {NO_LOG}'),
]

# A relation: the first key is the one that the message is about.
RELATIONS = [
    (
        ["cluster.pipeline_depth=3", "consistency.policy=ssp:2"],
        'flag --set: cluster.pipeline_depth: found 3 with consistency.policy = "ssp:2" (flag --set); allowed: <= 2, '
        "the policy's bound: a worker cannot hold more steps than it may run ahead",
    ),
    (
        ["cluster.pipeline_depth=1", "consistency.policy=ssp:0"],
        'flag --set: cluster.pipeline_depth: found 1 with consistency.policy = "ssp:0" (flag --set); allowed: <= 0, '
        "the policy's bound: a worker cannot hold more steps than it may run ahead",
    ),
    (
        ["cluster.pipeline_depth=1", "consistency.policy=auto"],
        'flag --set: cluster.pipeline_depth: found 1 with consistency.policy = "auto" (flag --set); allowed: 0 in '
        "auto, which overlaps transfers by itself",
    ),
    (  # P13
        ['variables."*.bias".encoding=topk:0.01', "consistency.policy=sync:2"],
        'flag --set: variables."*.bias".encoding: found "topk:0.01" with consistency.policy = "sync:2" (flag --set); '
        'allowed: "float32", "bfloat16" or "float16" in sync: what int8 and topk leave out depends on which worker '
        "computed which steps",
    ),
    (
        ["cluster.port=65531", "cluster.shards=2"],
        "flag --set: cluster.port: found 65531 with cluster.shards = 2 (flag --set); allowed: <= 65530, for two "
        "ports a shard",
    ),
    (
        ["cluster.port=7000-7008", "cluster.shards=2", "cluster.workers=2"],
        'flag --set: cluster.port: found "7000-7008" with cluster.shards = 2 (flag --set); allowed: at least 10 ports: '
        "two of the coordinator, three a shard, one a worker",
    ),
    (
        ["cluster.port=7000-7004"],
        'flag --set: cluster.port: found "7000-7004"; allowed: 1 to 65535, or a range of at least 6 ports as '
        '"7000-7099"',
    ),
    (
        ["cluster.interface=eth1", "cluster.host=10.0.0.1"],
        'flag --set: cluster.interface: found "eth1" with cluster.host = "10.0.0.1" (flag --set); allowed: one of the '
        "two",
    ),
    (
        ["cluster.host=interface:eth1"],
        'flag --set: cluster.host: found "interface:eth1"; allowed: an address or a name without a port, an IPv6 '
        "address without brackets, as ::1",
    ),
    (
        ["cluster.host=[::1]"],
        'flag --set: cluster.host: found "[::1]"; allowed: an address or a name without a port, an IPv6 address '
        "without brackets, as ::1",
    ),
    (
        ["optimizer.kind=lamb"],
        'default: cluster.partitioner.kind: found "minimum-size" with optimizer.kind = "lamb" (flag --set); '
        'allowed: "whole" with lamb, which needs the norm of whole variables: [cluster.partitioner] kind = "whole", or '
        'in a script settings={"cluster.partitioner": {"kind": "whole"}} of the trainer',
    ),
    (
        ["optimizer.learning_rate=-1"],
        'flag --set: optimizer.learning_rate: found -1.0 with model.kind = "softmax" (file job.toml); allowed: > 0',
    ),
]

ALLOWED = [
    ["cluster.pipeline_depth=2", "consistency.policy=ssp:2"],
    ["cluster.port=65530", "cluster.shards=2"],
    ["cluster.port=7000-7009", "cluster.shards=2", "cluster.workers=2"],
    ["cluster.interface=10.1.0.0/16"],
    ["cluster.pipeline_depth=0", "consistency.policy=ssp:0"],
    ["cluster.shard_device=cuda"],
    ["optimizer.staleness_damping=none", "optimizer.delay_compensation=0"],  # as job files of earlier runs say
    ["checkpoint.durability=checkpoint", "checkpoint.log_fsync=false"],  # likewise
    ['variables."*".encoding=float16', "consistency.policy=sync:2"],
    ['variables."*".encoding=int8', "consistency.policy=ssp:2"],
    ["optimizer.kind=lamb", "cluster.partitioner.kind=whole"],
    ["optimizer.learning_rate=-1", "model.kind=ledger"],
    ["model={kind='my_models:build', width=3, rate=inf}"],
]


def refusal(file: Path, sets: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_job(file, [parse_set(s) for s in sets], environ or {})
    return str(error.value)


@pytest.mark.parametrize(("set_key", "message"), KEYS, ids=[s for s, _ in KEYS])
def test_a_wrong_key(write_job: Callable[..., Path], set_key: str, message: str) -> None:
    assert refusal(write_job(), [set_key]) == f"flag --set: {message}"


@pytest.mark.parametrize(("sets", "message"), RELATIONS, ids=[" ".join(s) for s, _ in RELATIONS])
def test_keys_that_exclude_each_other(write_job: Callable[..., Path], sets: list[str], message: str) -> None:
    assert refusal(write_job(), sets) == message


@pytest.mark.parametrize("sets", ALLOWED, ids=" ".join)
def test_the_other_side_of_each_relation(write_job: Callable[..., Path], sets: list[str]) -> None:
    load_job(write_job(), [parse_set(s) for s in sets], {})


def test_every_problem_is_named_at_once_with_its_own_origin(write_job: Callable[..., Path], minimal: str) -> None:
    file = write_job(minimal.replace("batch_size = 8", "batch_size = 0").replace('source = "synthetic"', ""))
    assert refusal(file, ["cluster.shards=0"], {"PARASHARD_CLUSTR__WORKERS": "1"}) == (
        "the job has 4 problems:\n"
        "  file job.toml: job.batch_size: found 0; allowed: >= 1\n"
        f"  file job.toml: data.source: missing; allowed: {SOURCES}\n"
        "  flag --set: cluster.shards: found 0; allowed: >= 1\n"
        "  environment PARASHARD_CLUSTR__WORKERS: clustr: unknown key; did you mean cluster?"
    )


def test_relations_are_named_at_once(write_job: Callable[..., Path]) -> None:
    sets = ["cluster.pipeline_depth=3", "consistency.policy=ssp:2", "optimizer.kind=lamb", "optimizer.learning_rate=1"]
    lines = refusal(write_job(), sets).splitlines()
    assert lines[0] == "the job has 2 problems:"
    assert [line.split(": ")[1] for line in lines[1:]] == ["cluster.pipeline_depth", "cluster.partitioner.kind"]


def test_a_missing_table_is_the_files_to_give(write_job: Callable[..., Path]) -> None:
    assert refusal(write_job('[job]\nname = "x"\nepochs = 1\nbatch_size = 1'), ["data.source=digits"]) == (
        "the job has 2 problems:\n"
        "  file job.toml: model: missing; needed: What computes the loss and its gradients.\n"
        "  file job.toml: optimizer: missing; needed: How a gradient changes the variables."
    )


def test_a_missing_table_is_the_files_to_give_even_if_a_flag_gave_all_else(write_job: Callable[..., Path]) -> None:
    lines = refusal(write_job(""), ["data.source=digits"]).splitlines()
    assert lines[1] == "  file job.toml: job: missing; needed: What is trained for how long."


def test_a_table_reads_no_value_as_another_type() -> None:
    with pytest.raises(ValidationError, match="epochs"):
        validated(JobOptions, {"name": "x", "epochs": True, "batch_size": 1})


def test_a_job_is_checked_as_a_whole_too() -> None:
    with pytest.raises(ValidationError, match=r"cluster.pipeline_depth with consistency.policy: allowed: <= 2"):
        validated(
            Job,
            {
                "job": {"name": "x", "epochs": 1, "batch_size": 1},
                "data": {"source": "digits"},
                "model": {"kind": "softmax"},
                "optimizer": {"kind": "adam"},
                "cluster": {"pipeline_depth": 3},
                "consistency": {"policy": "ssp:2"},
            },
        )
