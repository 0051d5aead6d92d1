"""Building a shard: its place in the plan, its arithmetic by the job file, its first values by seed or file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import plan_of, pull, push, variables_of
from safetensors.numpy import save_file

from parashard.contracts import plan_message
from parashard.errors import BadData, ConfigurationError
from parashard.job.load import as_toml, job_from_toml
from parashard.job.schema import Job
from parashard.messages import PushResult, Target
from parashard.optimizers import SGD, Adam
from parashard.partition import fixed_shards
from parashard.variables import Initializer, Variable, initial_rows
from protos import coordinator_pb2 as pb
from ps_server.build import build_shard
from ps_server.ingest import Immediate, Rounds
from ps_server.shard import Shard

SEED = 11
VARIABLES = variables_of(Variable("bias", (2,)), Variable("weight", (4, 3), Initializer("normal", 1.0)))
PLAN = plan_of(VARIABLES, shards=2, partitioner=fixed_shards(2))


def built(
    index: int = 0,
    *,
    optimizer: dict[str, Any] | None = None,
    consistency: str = "async",
    reduce: str = "mean",
    initial_file: str = "",
    steps: int = 10,
) -> Shard:
    text = f"""
        [job]
        name = "test"
        seed = {SEED}
        epochs = 1
        batch_size = 1
        [data]
        source = "digits"
        [model]
        kind = "ledger"
        [optimizer]
        kind = "sgd"
        learning_rate = -1.0
        [consistency]
        policy = "{consistency}"
        reduce = "{reduce}"
        [cluster]
        queue_bytes = 4096
        """
    overrides = [(f"optimizer.{key}", value, "--set") for key, value in (optimizer or {}).items()]
    job: Job = job_from_toml(text, overrides)
    reply = pb.GetJobReply(
        run_id="run-9",
        job_digest="e" * 64,
        job_toml=as_toml(job),
        plan=plan_message(PLAN),
        initial_file=initial_file,
        steps_total=steps,
    )
    shard, same_job = build_shard(reply, index, incarnation=4)
    assert same_job == job
    return shard


def joined(**more: Any) -> dict[str, np.ndarray]:
    """Return the variables of both shards, put together."""
    values = {name: np.full(v.shape, np.nan, np.float32) for name, v in VARIABLES.items()}
    for index in range(2):
        shard = built(index, **more)
        for placed in shard.storage.layout:
            p = placed.partition
            target = values[p.variable][p.row_start : p.row_stop]
            target[:] = shard.storage.weights[placed.offset : placed.stop].reshape(target.shape)
    return values


def test_a_shard_knows_which_life_of_which_job_it_is() -> None:  # P2, P3
    shard = built(1)
    assert shard.identity == Target("run-9", "e" * 64, PLAN.version, 1, 4)
    assert shard.steps_total == 10


@pytest.mark.parametrize("index", [2, -1])
def test_a_shard_that_the_plan_lacks_cannot_be_built(index: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"shards 0\.\.1; this process was started as {index}"):
        built(index)


def test_without_a_file_values_are_drawn_from_the_jobs_seed() -> None:
    for name, values in joined().items():
        np.testing.assert_array_equal(values, initial_rows(VARIABLES[name], SEED, 0, VARIABLES[name].rows))


def test_consistency_chooses_what_becomes_of_pushes() -> None:
    for policy in ("async", "ssp:3"):
        shard = built(consistency=policy)
        assert isinstance(shard.ingest, Immediate)
        assert push(shard, 0, 1.0).result is PushResult.APPLIED
    shard = built(consistency="sync:4")
    assert isinstance(shard.ingest, Rounds)
    assert push(shard, 0, 1.0).result is PushResult.BUFFERED


@pytest.mark.parametrize(("reduce", "moved"), [("mean", 1.5), ("sum", 3.0)])
def test_rounds_are_reduced_as_the_job_says(reduce: str, moved: float) -> None:  # P13
    shard = built(consistency="sync:2", reduce=reduce)
    before = pull(shard, round_=0)[1]
    push(shard, 0, 1.0)
    push(shard, 1, 2.0)
    np.testing.assert_allclose(pull(shard, round_=1)[1] - before, moved, rtol=1e-5)


def test_damping_follows_the_job() -> None:
    for damping, moved in (("none", 1.0), ("inverse", 0.5)):
        shard = built(optimizer={"staleness_damping": damping})
        push(shard, 0, 0.0)
        before = pull(shard)[1]
        push(shard, 1, 1.0, pulled_version=0)
        np.testing.assert_allclose(pull(shard)[1] - before, moved, rtol=1e-5)


def test_delay_compensation_follows_the_job() -> None:
    for strength, moved in ((0.0, 2.0), (0.5, 2.0 + 0.5 * 4.0 * 1.0)):
        shard = built(optimizer={"delay_compensation": strength})
        pull(shard, step=1)
        push(shard, 0, 1.0)
        before = pull(shard)[1]
        push(shard, 1, 2.0, pulled_version=0)
        np.testing.assert_allclose(pull(shard)[1] - before, moved, rtol=1e-5)


@pytest.mark.parametrize(("consistency", "updates"), [("async", 10), ("sync:4", 3)])
def test_a_schedule_as_long_as_the_job_counts_its_updates(consistency: str, updates: int) -> None:  # P15
    shard = built(
        optimizer={"schedule": {"kind": "exponential", "decay_steps": "job", "rate": 0.5}}, consistency=consistency
    )
    assert shard.storage._optimizer.spec.schedule.factor(1 + updates) == 0.5


def test_the_optimizer_has_its_slots() -> None:
    adam = built(optimizer={"kind": "adam", "learning_rate": 0.1})
    assert isinstance(adam.storage._optimizer.spec, Adam)
    assert set(adam.storage.slots) == {"m", "v"}
    assert isinstance(built().storage._optimizer.spec, SGD)


# --- a file of first values ---


def test_a_file_gives_the_values_of_the_variables_that_it_holds(tmp_path: Path) -> None:
    weight = np.arange(12, dtype=np.float64).reshape(4, 3)
    save_file({"weight": weight, "of another model": weight}, tmp_path / "start.safetensors")
    values = joined(initial_file=str(tmp_path / "start.safetensors"))
    assert values["weight"].tolist() == weight.tolist()
    assert values["bias"].tolist() == [0.0, 0.0]  # drawn


def test_a_file_with_another_shape_is_refused(tmp_path: Path) -> None:
    save_file({"weight": np.zeros((3, 4), np.float32)}, tmp_path / "start.safetensors")
    with pytest.raises(BadData, match=r"start.safetensors: variable 'weight' has shape \(3, 4\), .* \(4, 3\)"):
        joined(initial_file=str(tmp_path / "start.safetensors"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"gone\.safetensors: cannot be read as safetensors"):
        built(initial_file=str(tmp_path / "gone.safetensors"))


def test_a_file_of_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "start.safetensors").write_bytes(b"PK\x03\x04 not ours")
    with pytest.raises(BadData, match=r"start\.safetensors: cannot be read as safetensors"):
        built(initial_file=str(tmp_path / "start.safetensors"))
