"""Jobs of a script: the table of settings that a call makes, and the check that a worker's call makes the same one.

Knows no process. Called by the trainer, the coordinator and the cluster of `parashard.api`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from parashard.api.code import Code, check_same_code
from parashard.api.optimizers import has_taken_steps, optimizer_of
from parashard.api.script import SCRIPT
from parashard.api.strategies import InProcessStrategy, ParameterServerStrategy, Strategy
from parashard.data.base import DataSpec
from parashard.errors import ConfigurationError
from parashard.job.declared_table import Table
from parashard.job.keys import leaves, shown
from parashard.job.load import LoadedJob, job_from_table, job_of_run
from parashard.job.schema import Job
from parashard.models.base import FrameworkModel, Model
from parashard.models.declaration import declare, read_declaration
from parashard.plan.optimizers import OptimizerSpec
from parashard.process.run_files import JOB_FILE, NEW_JOB_FILE

DEFINING = ("job", "data", "model", "optimizer", "consistency", "variables", "tables")
"""The tables of a job that decide what its steps compute."""
_ARGUMENTS = {
    "job.seed": "seed",
    "job.name": "name",
    "job.epochs": "epochs",
    "job.first_epoch": "initial_epoch",
    "job.batch_size": "batch_size",
    "job.steps_per_epoch": "steps_per_epoch",
    "job.drop_last": "drop_last",
    "job.shuffle": "shuffle",
    "consistency.policy": "consistency",
}
"""What a script calls keys that it sets by an argument."""


class Parts(NamedTuple):
    """What a program says of a job besides its data and its model."""

    name: str
    optimizer: OptimizerSpec
    strategy: Strategy
    seed: int
    settings: Mapping[str, Any]
    variables: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    tables: Mapping[str, Table] = MappingProxyType({})
    updates_before: int | None = None
    rate_factor: float = 1.0
    """Of the optimizers of tables."""


def checked_optimizer(optimizer: Any) -> OptimizerSpec:
    """Return the shards' optimizer for any that maps onto one; refuse one with settings of single parameters."""
    mapped = optimizer_of(optimizer)
    if len(mapped.groups) > 1:
        raise ConfigurationError("an optimizer with groups of parameters needs their module: give it to a ps.Trainer")
    if has_taken_steps(optimizer):
        raise ConfigurationError("the optimizer has taken steps, and only a ps.Trainer goes on with it: give a new one")
    return mapped.spec


def checked_strategy(strategy: Strategy | None) -> Strategy:
    """Return the strategy, by default two shards and two workers."""
    if strategy is not None and not isinstance(strategy, Strategy):
        found = f"the class {strategy.__name__}" if isinstance(strategy, type) else type(strategy).__name__
        raise ConfigurationError(f"strategy is one of parashard's, such as ps.OneDeviceStrategy(), found {found}")
    return strategy or ParameterServerStrategy()


def checked_servers(strategy: Strategy | None) -> ParameterServerStrategy:
    """Return the strategy of what needs shards and workers."""
    if strategy is not None and not isinstance(strategy, ParameterServerStrategy):
        raise ConfigurationError(f"strategy is a ps.ParameterServerStrategy(...), found {type(strategy).__name__}")
    return strategy or ParameterServerStrategy()


def job_of(
    parts: Parts,
    program: Path,
    sizes: Mapping[str, int],
    *,
    cluster: Mapping[str, Any] | None = None,
) -> LoadedJob:
    """Return the job of a call, checked as a job file is; the environment says what the program leaves open.

    Parameters
    ----------
    parts : Parts
    program : Path
        The file that makes the call.
    sizes : mapping of str to int
        "epochs", "batch_size" and the like, of `[job]`.
    cluster : mapping of str to object, optional
        Keys of `[cluster]` where the program says nothing else.
    """
    tables = tables_of(parts, sizes, cluster)
    # What trains in one process has no cluster to place.
    environ = {} if isinstance(parts.strategy, InProcessStrategy) else os.environ
    table = {**tables, "data": {"source": "script"}, "model": {"kind": "script"}}
    overrides = SCRIPT.resume_flags.overrides
    if isinstance(parts.strategy, InProcessStrategy):
        flag = next((flag for key, _, flag in overrides if key.startswith("cluster.")), "")
        if flag:
            raise ConfigurationError(f"{flag}: {type(parts.strategy).__name__} has no cluster")
    return job_from_table(table, program, environ, overrides, words=_words(parts))


def _words(parts: Parts) -> dict[str, str]:
    """Return what a script calls the keys of its job: the argument, and of what."""
    strategy, optimizer = f"ps.{type(parts.strategy).__name__}", f"ps.{type(parts.optimizer).__name__}"
    return {
        **_ARGUMENTS,
        "consistency.policy": f"{strategy}: consistency",
        **{f"cluster.{name}": f"{strategy}: {name}" for name in parts.strategy.cluster},
        **{f"optimizer.{name}": f"{optimizer}: {name}" for name in parts.optimizer.keys},
        **{key: f"settings: {key}" for key in parts.settings},
    }


def tables_of(
    parts: Parts, sizes: Mapping[str, int], cluster: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the tables of a job but for its data and model; parameters as for `job_of`."""
    before = {} if parts.updates_before is None else {"updates_before": parts.updates_before}
    table: dict[str, Any] = {
        "job": {"name": parts.name, "seed": parts.seed, **before, **sizes},
        "optimizer": {name: value for name, value in parts.optimizer.plain().items() if value is not None},
        "variables": dict(parts.variables),
        "tables": {name: _table(declared, parts.rate_factor) for name, declared in parts.tables.items()},
        "consistency": {"policy": parts.strategy.consistency},
        "cluster": {**(cluster or {}), **parts.strategy.cluster},
    }
    for key, value in parts.settings.items():
        above, _, name = str(key).rpartition(".")
        if not above or "." in above:
            raise ConfigurationError(f"settings: {key!r}; allowed: TABLE.KEY of a job file")
        if above == "tables":
            raise ConfigurationError(f"settings: {key!r} is of a table: ps.Table(...) of the model says it")
        if above in ("data", "model", "optimizer") or key in _ARGUMENTS:
            raise ConfigurationError(f"settings: {key!r} is an argument of the trainer, of fit or of the strategy")
        if above == "cluster" and isinstance(parts.strategy, InProcessStrategy):
            raise ConfigurationError(f"settings: {key!r} is of a cluster, and {type(parts.strategy).__name__} has none")
        table.setdefault(above, {})[name] = value
    if isinstance(parts.strategy, InProcessStrategy):
        table["job"].setdefault("max_attempts", 1)  # another one would go no better: there is no other process
    return table


SEEDED = (
    "such as numpy.random.default_rng(0), and sort what it makes of a set of texts: the order differs from process to "
    "process, unless all have one PYTHONHASHSEED"
)


def _table(declared: Table, rate_factor: float) -> dict[str, Any]:
    plain = declared.plain()
    if rate_factor != 1.0:
        rate = declared.embedding.optimizer.learning_rate * rate_factor
        plain["optimizer"] = {**plain["optimizer"], "learning_rate": rate}
    return plain


def check_same_call(mine: LoadedJob, spec: DataSpec, code: Code, run_dir: Path) -> None:
    """Refuse, in a worker, a call that is not the parent's: no attempt would go better.

    Parameters
    ----------
    mine : LoadedJob
        The job of the call in this process.
    spec : DataSpec
        Its data.
    code : Code
        Of its model.
    run_dir : Path
        Of the parent's call.
    """
    whole = read_declaration(run_dir, rows=False)
    declared = whole.spec
    if spec.fingerprint != declared.fingerprint:
        raise ConfigurationError(
            f"the data of this call are others in this worker ({spec.summary()}, fingerprint {spec.fingerprint[:12]}) "
            f"than in the process that started it ({declared.summary()}, {declared.fingerprint[:12]}): a script loads "
            f"the same data wherever it runs; seed what it draws, {SEEDED}"
        )
    check_same_code(run_dir, code)
    file = next(path for path in (run_dir / NEW_JOB_FILE, run_dir / JOB_FILE) if path.exists())
    check_same_job(mine, job_of_run(file).job)


SAME = f"a script makes the same model wherever it runs: seed what it draws, {SEEDED}"


def check_same_model(model: Model, run_dir: Path) -> None:
    """Refuse, in a worker, a model whose variables are not those of the run.

    First values of a framework's model are compared by the framework's own means; those of a model with hand-written
    gradients are drawn by the script, and what else it drew with them would differ, too.
    """
    theirs = read_declaration(run_dir, rows=False)
    mine = declare(theirs.spec, model, rows=False)
    other = "in this worker than in the process that started it"
    for name in sorted(mine.variables.keys() | theirs.variables.keys()):
        here, there = mine.variables.get(name), theirs.variables.get(name)
        if here is None or there is None:
            raise ConfigurationError(
                f"the model has other variables {other}: {name!r} is only {'there' if here is None else 'here'}; {SAME}"
            )
        if here.shape != there.shape:
            raise ConfigurationError(
                f"variable {name!r} of the model has another shape {other}: {here.shape} here and {there.shape} there; "
                f"{SAME}"
            )
        own, due = mine.arrays.get(name), theirs.arrays.get(name)
        is_drawn = not isinstance(model, FrameworkModel) and own is not None and due is not None
        if is_drawn and not np.array_equal(own, due):  # type: ignore[arg-type]
            raise ConfigurationError(
                f"variable {name!r} of the model has other first values {other}: seed what the script draws, {SEEDED}"
            )


def check_same_job(mine: LoadedJob, other: Job) -> None:
    """Refuse, in a worker, a call whose job is not the run's."""
    different = different_key(mine, other, "in the process that started it")
    if different:
        raise ConfigurationError(f"this call is another one in this worker: {different}")


def different_key(mine: LoadedJob, other: Job, there: str = "there") -> str:
    """Return the first key that decides what steps compute and has another value in another job; "": there is none.

    A consistency policy that is left open is that of the other job.
    """
    theirs = dict(leaves(other.plain()))
    own = dict(leaves(mine.as_begun(other).job.plain()))
    for key in sorted(theirs.keys() | own.keys()):
        if key[0] in DEFINING and theirs.get(key) != own.get(key):
            said = _ARGUMENTS.get(".".join(key), ".".join(key))
            return f"{said} is {shown(own.get(key))} here and {shown(theirs.get(key))} {there}"
    return ""
