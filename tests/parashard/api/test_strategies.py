"""What each strategy stands for, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import parashard as ps
from parashard.api.jobs import job_of, tables_of
from parashard.api.strategies import Strategy
from parashard.errors import ConfigurationError
from parashard.job.load import LoadedJob
from parashard.process import cuda
from support.line_model import Line

STRATEGIES: dict[str, tuple[Callable[[], Strategy], str, int]] = {
    "OneDevice": (ps.OneDeviceStrategy, "sync:1", 1),
    "Mirrored": (lambda: ps.MirroredStrategy(4), "sync:4", 1),
    "Mirrored by names": (lambda: ps.MirroredStrategy(["cpu", "cpu", "cpu"]), "sync:3", 1),
    "CentralStorage": (lambda: ps.CentralStorageStrategy(devices=4), "sync:4", 1),
    "MultiWorkerMirrored": (lambda: ps.MultiWorkerMirroredStrategy(4), "sync:4", 4),
    "MultiWorkerMirrored with fewer shards": (lambda: ps.MultiWorkerMirroredStrategy(4, shards=2), "sync:4", 2),
    "ParameterServer": (lambda: ps.ParameterServerStrategy(3, 5, "ssp:2"), "ssp:2", 3),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_a_consistency_and_a_cluster(name: str) -> None:
    make, consistency, shards = STRATEGIES[name]
    strategy = make()
    assert (strategy.consistency, strategy.cluster["shards"]) == (consistency, shards)
    with strategy.scope():
        ps.Trainer(Line(), strategy=strategy)


def test_with_tables_variables_lie_beside_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    strategy = ps.OneDeviceStrategy("cuda:1")
    found = [tables_of(strategy, ps.SGD(0.1), {}, tables=tables)["cluster"] for tables in ({}, {"users": {}})]
    assert [(one["device"], one["shard_device"]) for one in found] == [("cuda:1", "cuda:1"), ("cuda:1", "cpu")]


def test_variables_lie_on_the_device_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    found = {
        kind.__name__: [strategy.cluster[key] for key in ("device", "shard_device")]
        for kind in (ps.MirroredStrategy, ps.CentralStorageStrategy)
        for strategy in [kind(["cuda:1", "cuda:1"])]
    }
    assert found == {"MirroredStrategy": ["cuda:1", "cuda:1"], "CentralStorageStrategy": ["cuda:1", "cuda:1"]}
    assert ps.OneDeviceStrategy().cluster["device"] == "cuda:0"


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "no replica": (lambda: ps.MirroredStrategy(0), r"devices must be a whole number from 1 to 4096, found 0"),
    "no devices": (
        lambda: ps.CentralStorageStrategy([]),
        r"devices is empty; allowed: a number, or a name such as cpu",
    ),
    "an unknown device": (
        lambda: ps.MirroredStrategy(["/gpu:0"]),
        r"device '/gpu:0' is unknown; allowed: auto, cpu, cuda:N",
    ),
    "a device that is not there": (
        lambda: ps.OneDeviceStrategy("cuda:9"),
        r"device cuda:9 is not there: .* has 2 CUDA",
    ),
    "devices that are no list": (
        lambda: ps.MirroredStrategy(1.5),
        r"devices is a number or a list of names .*found 1.5",
    ),  # type: ignore[arg-type]
    "threads of processes": (
        lambda: ps.ParameterServerStrategy(threads=1),
        r"ps.ParameterServerStrategy has no threads=; worker_threads= and shard_threads= are of processes; allowed: "
        r"shards, workers, consistency, workers_as, tls_dir, cluster, device",
    ),
    "a misspelt key": (
        lambda: ps.ParameterServerStrategy(consistancy="async"),
        "has no consistancy=; allowed: shards, ",
    ),
    "a consistency where it is given": (
        lambda: ps.MultiWorkerMirroredStrategy(2, consistency="async"),
        "ps.MultiWorkerMirroredStrategy has no consistency=; allowed: workers, workers_as, tls_dir, shards, ",
    ),
    "workers of one process": (
        lambda: ps.OneDeviceStrategy(workers=3),  # type: ignore[call-arg]
        r"^ps.OneDeviceStrategy has no workers=; allowed: device, threads$",
    ),
    "too many arguments": (
        lambda: ps.MirroredStrategy(2, 1, 3),  # type: ignore[call-arg]
        r"^ps.MirroredStrategy has no 3 arguments; allowed: devices, threads$",
    ),
    "two devices": (
        lambda: ps.MirroredStrategy(["cuda:0", "cuda:1"]),
        r"devices are cuda:0, cuda:1: .*ps.MultiWorkerMirroredStrategy\(workers=2\) has a process for each",
    ),
    "no workers": (
        lambda: ps.MultiWorkerMirroredStrategy("4"),
        r"workers must be a whole number from 1 to 4096, found '4'",
    ),  # type: ignore[arg-type]
    "workers that are neither": (
        lambda: ps.ParameterServerStrategy(workers_as="fibres"),
        r"workers_as is 'processes' or 'threads', found 'fibres'",
    ),
    "functions for threads": (
        lambda: ps.Coordinator(ps.ParameterServerStrategy(workers_as="threads"), variables={}),
        r"ps.Coordinator with workers_as='threads': .*; allowed: 'processes'",
    ),
    "threads": (lambda: ps.OneDeviceStrategy(threads=-1), r"threads .* must be a whole number of at least 0, found -1"),
    "threads that are true": (
        lambda: ps.OneDeviceStrategy(threads=True),
        r"^ps.OneDeviceStrategy: threads .* must be a whole number of at least 0, found True$",
    ),
    "examples of a cluster": (
        lambda: ps.Cluster({"w": [0.0]}, examples="3"),  # type: ignore[arg-type]
        r"^ps.Cluster: examples must be a whole number of at least 1, found '3'$",
    ),
    "a class": (
        lambda: ps.Trainer(Line(), strategy=ps.MirroredStrategy),  # type: ignore[arg-type]
        r"strategy is one of parashard's, such as ps.OneDeviceStrategy\(\), found the class MirroredStrategy",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    call, sentence = MISTAKES[mistake]
    with pytest.raises(ConfigurationError, match=sentence):
        call()


def test_what_a_strategy_leaves_open_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded_by(strategy: Strategy) -> LoadedJob:
        keys = {"name": "job", "seed": 0, "epochs": 1, "batch_size": 1}
        return job_of(Path("train.py"), strategy, ps.SGD(0.1), keys, {"checkpoint.keep": 7})

    servers = ps.ParameterServerStrategy(shards=3)
    assert loaded_by(servers).job.cluster.workers == 2
    for name, value in {
        "PARASHARD_CLUSTER__SHARDS": "5",
        "PARASHARD_CLUSTER__WORKERS": "0",
        "PARASHARD_CLUSTER__PARTITIONER__KIND": "whole",
        "PARASHARD_CHECKPOINT__KEEP": "9",
        "PARASHARD_CHECKPOINT__EVERY_S": "1.5",
        "PARASHARD_OPTIMIZER__LEARNING_RATE": "7",
    }.items():
        monkeypatch.setenv(name, value)
    loaded = loaded_by(servers)
    job = loaded.job
    assert (job.cluster.shards, job.cluster.workers, job.cluster.partitioner.kind) == (3, 0, "whole")
    assert (job.checkpoint.keep, job.checkpoint.every_s, job.optimizer.learning_rate) == (7, 1.5, 0.1)
    assert loaded.origins["cluster.workers"] == "environment PARASHARD_CLUSTER__WORKERS"
    here = loaded_by(ps.OneDeviceStrategy("cpu")).job
    assert (here.cluster.shards, here.cluster.partitioner.kind, here.checkpoint.every_s) == (1, "whole", 30.0)
    monkeypatch.setenv("PARASHARD_CLUSTER_HOST", "train")
    with pytest.raises(ConfigurationError, match="not a key; did you mean PARASHARD_CLUSTER__HOST"):
        loaded_by(servers)
    monkeypatch.delenv("PARASHARD_CLUSTER_HOST")
    monkeypatch.setenv("PARASHARD_CLUSTER__WORKER", "1")
    with pytest.raises(ConfigurationError, match=r"PARASHARD_CLUSTER__WORKER: cluster\.worker: unknown key"):
        loaded_by(servers)


def test_the_folder_of_credentials_is_the_strategys_else_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ps.ParameterServerStrategy().tls_dir is None
    monkeypatch.setenv("PARASHARD_TLS_DIR", "there")
    assert ps.ParameterServerStrategy().tls_dir == Path("there")
    assert ps.MultiWorkerMirroredStrategy(2, tls_dir="here").tls_dir == Path("here")


def test_where_processes_run_is_an_object() -> None:
    with pytest.raises(
        ConfigurationError, match=r"cluster is ps\.Ray\(\.\.\.\), or None for this machine, found 'ray'$"
    ):
        ps.ParameterServerStrategy(cluster="ray")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"cluster= and launcher='local' both say where .*; allowed: one"):
        ps.ParameterServerStrategy(cluster=ps.Ray("h:1"), launcher="local")


def test_numpys_numbers_are_taken_where_pythons_are() -> None:
    """A job and a layer have Python's, whose arithmetic and JSON do not depend on where a number came from."""
    two, half = np.int64(2), np.float32(0.5)
    counts = {"shards": two, "workers": two, "lease_batch": two, "grace_s": half}
    strategies = [ps.MirroredStrategy(two), ps.MultiWorkerMirroredStrategy(two), ps.ParameterServerStrategy(**counts)]
    for strategy in [*strategies, ps.OneDeviceStrategy(threads=two)]:
        keys = {"name": "job", "seed": 0, "epochs": two, "batch_size": two}
        job = job_of(Path("train.py"), strategy, ps.SGD(half), keys, {"checkpoint.keep": two}).job
        assert (job.job.epochs, job.checkpoint.keep, job.optimizer.learning_rate) == (2, 2, 0.5)
    assert (strategies[0].cluster["workers"], ps.OneDeviceStrategy(threads=two).threads) == (1, 2)
    made = [ps.layers.Dense(two).units, ps.layers.Dropout(half).rate, ps.Table("ids", two).row_elements]
    assert [(number, type(number)) for number in made] == [(2, int), (0.5, float), (2, int)]
