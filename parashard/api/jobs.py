"""Build a job from the arguments of a script's call, and check that a worker's call builds the same job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from parashard.api.code import Code, check_same_code
from parashard.api.examples.indexed import Indexed
from parashard.api.optimizers import has_taken_steps, optimizer_of
from parashard.api.script import SCRIPT
from parashard.api.strategies import InProcessStrategy, ParameterServerStrategy, Strategy
from parashard.data import open_source
from parashard.data.base import DataSource, DataSpec
from parashard.errors import ConfigurationError
from parashard.job.embeddings import plain_of
from parashard.job.embeddings import tables_of as embedding_tables
from parashard.job.keys import leaves, shown
from parashard.job.load import LoadedJob, as_toml, job_from_table, job_of_run
from parashard.job.schema import Job
from parashard.models.base import Initial
from parashard.models.building import build_model
from parashard.models.declaration import DeclaredJob, parts_of, read_declaration
from parashard.models.looking_up import check_looks_up
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.optimizers import OptimizerSpec
from parashard.process.arguments import checked_whole
from parashard.process.run_files import JOB_FILE, NEW_JOB_FILE

DEFINING = ("job", "data", "model", "optimizer", "consistency", "variables", "tables")
"""The tables of a job that determine the result of its steps."""
BATCH_SIZE = 32
NOTHING: Mapping[str, Any] = MappingProxyType({})
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
"""Names in a script of the job keys that it sets by an argument."""


def checked_optimizer(optimizer: Any) -> OptimizerSpec:
    """Return the shards' equivalent of an optimizer; refuse one with several groups, or one that has taken steps."""
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
    """Return a strategy with shards and workers; refuse another kind."""
    if strategy is not None and not isinstance(strategy, ParameterServerStrategy):
        raise ConfigurationError(f"strategy is a ps.ParameterServerStrategy(...), found {type(strategy).__name__}")
    return strategy or ParameterServerStrategy()


def examples_of_a_step(
    consistency: str,
    batch_size: int | None,
    global_batch_size: int | None,
    gradient_accumulation: int,
    own: int | None,
    *,
    batched: bool,
) -> int:
    """Return the batch size of a job; `own` is the data's own, and `batched` data have one batch per index."""
    sizes = {
        "batch_size": batch_size,
        "global_batch_size": global_batch_size,
        "gradient_accumulation": gradient_accumulation,
    }
    for name, size in sizes.items():
        if size is not None:
            checked_whole(name, size)
    if batch_size is not None and global_batch_size is not None:
        raise ConfigurationError("batch_size and global_batch_size: allowed is one of the two")
    if batched:
        if batch_size is not None or global_batch_size is not None:
            raise ConfigurationError("the items of these data are batches already, and each is one step: no batch_size")
        return 1
    if own is not None and batch_size not in (None, own):
        raise ConfigurationError(f"batch_size is {batch_size}, and the DataLoader's is {own}: say it once")
    if global_batch_size is None:
        return int(batch_size or own or BATCH_SIZE) * gradient_accumulation
    steps = int(consistency.partition(":")[2] or 1) if consistency.startswith("sync:") else 1
    if global_batch_size % (steps * gradient_accumulation):
        raise ConfigurationError(
            f"global_batch_size is {global_batch_size}, which {steps} steps of a round"
            f"{f' in {gradient_accumulation} pieces each' if gradient_accumulation > 1 else ''} do not divide"
        )
    return int(global_batch_size) // steps


def epochs_of_a_job(epochs: int, initial_epoch: int) -> dict[str, int]:
    """Return job keys for epochs `initial_epoch` to `epochs` - 1; raise ConfigurationError if there are none."""
    checked_whole("initial_epoch", initial_epoch, 0)
    checked_whole("epochs", epochs)
    if not initial_epoch:
        return {"epochs": epochs}
    if epochs <= initial_epoch:
        raise ConfigurationError(f"initial_epoch is {initial_epoch} and epochs is {epochs}: there is none to train")
    return {"epochs": epochs - initial_epoch, "first_epoch": int(initial_epoch)}


def order_of_a_job(
    steps_per_epoch: int | None, drop_last: bool | None, shuffle: bool, source: DataSource
) -> dict[str, Any]:
    """Return job keys for the order of examples, without those that have their default."""
    for name, value in (("drop_last", drop_last), ("shuffle", shuffle)):
        if value not in (True, False) and not (name == "drop_last" and value is None):
            raise ConfigurationError(f"{name} is True or False, found {value!r}")
    if drop_last and source.spec.batched:
        raise ConfigurationError(
            "drop_last: the items of these data are batches already; let the dataset be shorter by its last one"
        )
    if drop_last is None:
        drop_last = getattr(source, "drop_last", False)
    keys: dict[str, Any] = {}
    if steps_per_epoch is not None:
        keys["steps_per_epoch"] = checked_whole("steps_per_epoch", steps_per_epoch)
    if drop_last:
        keys["drop_last"] = True
    if not shuffle:
        keys["shuffle"] = False
    return keys


def validation_examples(validation_steps: int | None, batch_size: int | None) -> Callable[[Indexed], int] | None:
    """Return a function from held-out data to the number of examples in `validation_steps` batches; None: use all."""
    if validation_steps is None:
        return None
    steps = checked_whole("validation_steps", validation_steps)
    return lambda held_out: steps * (held_out.batch_size or batch_size or BATCH_SIZE)


def job_of(
    program: Path,
    strategy: Strategy,
    optimizer: OptimizerSpec,
    job: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    **tables: Mapping[str, Any],
) -> LoadedJob:
    """Return the job of a call, validated like a job file; the environment sets keys that the program leaves open."""
    table = tables_of(strategy, optimizer, job, settings, **tables)
    overrides = SCRIPT.resume_flags.overrides
    environ: Mapping[str, str] = os.environ
    if isinstance(strategy, InProcessStrategy):
        environ = {}  # training in one process has no cluster to configure
        flag = next((flag for key, _, flag in overrides if key.startswith("cluster.")), "")
        if flag:
            raise ConfigurationError(f"{flag}: {type(strategy).__name__} has no cluster")
    table |= {"data": {"source": "script"}, "model": {"kind": "script"}}
    return job_from_table(table, program, environ, overrides, words=_words(strategy, optimizer, settings or {}))


def _words(strategy: Strategy, optimizer: OptimizerSpec, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the script's names for keys of its job: the object and its argument."""
    of_strategy, of_optimizer = f"ps.{type(strategy).__name__}", f"ps.{type(optimizer).__name__}"
    return {
        **_ARGUMENTS,
        "consistency.policy": f"{of_strategy}: consistency",
        **{f"cluster.{name}": f"{of_strategy}: {name}" for name in strategy.cluster},
        **{f"optimizer.{name}": f"{of_optimizer}: {name}" for name in type(optimizer).model_fields},
        **{key: f"settings: {key}" for key in settings},
    }


def tables_of(
    strategy: Strategy,
    optimizer: OptimizerSpec,
    job: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    *,
    variables: Mapping[str, Any] = NOTHING,
    tables: Mapping[str, Any] = NOTHING,
    cluster: Mapping[str, Any] = NOTHING,
) -> dict[str, dict[str, Any]]:
    """Return a job's tables without data and model; `cluster` has keys that the strategy leaves open."""
    table: dict[str, Any] = {
        "job": {name: value for name, value in job.items() if value is not None},
        "optimizer": {name: value for name, value in optimizer.plain().items() if value is not None},
        "variables": dict(variables),
        "tables": dict(tables),
        "consistency": {"policy": strategy.consistency},
        "cluster": {**cluster, **strategy.cluster},
    }
    in_process = isinstance(strategy, InProcessStrategy)
    for key, value in (settings or {}).items():
        above, _, name = str(key).rpartition(".")
        if not above or "." in above:
            raise ConfigurationError(f"settings: {key!r}; allowed: TABLE.KEY of a job file")
        if above == "tables":
            raise ConfigurationError(f"settings: {key!r} is of a table: ps.Table(...) of the model says it")
        if above in ("data", "model", "optimizer") or key in _ARGUMENTS:
            raise ConfigurationError(f"settings: {key!r} is an argument of the trainer, of fit or of the strategy")
        if above == "cluster" and in_process:
            raise ConfigurationError(f"settings: {key!r} is of a cluster, and {type(strategy).__name__} has none")
        table.setdefault(above, {})[name] = value
    if in_process:
        table["job"].setdefault("max_attempts", 1)  # a retry would run in the same process and fail again
        if tables:
            table["cluster"]["shard_device"] = "cpu"  # for rows; the model computes on the strategy's device
    return table


def plain_tables(tables: Mapping[str, EmbeddingTable], rate_factor: float = 1.0) -> dict[str, dict[str, Any]]:
    """Return embedding tables as tables of a job; `rate_factor` multiplies the rates of their optimizers."""
    found = {}
    for name, declared in tables.items():
        plain = plain_of(declared)
        if rate_factor != 1.0:
            rate = declared.optimizer.learning_rate * rate_factor
            plain["optimizer"] = {**plain["optimizer"], "learning_rate": rate}
        found[name] = plain
    return found


SEEDED = (
    "such as numpy.random.default_rng(0), and sort what it makes of a set of texts: the order differs from process to "
    "process, unless all have one PYTHONHASHSEED"
)


def check_same_call(mine: LoadedJob, spec: DataSpec, code: Code, run_dir: Path) -> None:
    """Refuse, in a worker, a call that differs from the parent's; a retry would fail too."""
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


def check_same_model(mine: DeclaredJob, run_dir: Path, *, values: bool = True) -> None:
    """Refuse, in a worker, a model whose variables (or, with `values`, initial values) differ from the run's."""
    theirs = read_declaration(run_dir, rows=False)
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
        if values and own is not None and due is not None and not np.array_equal(own, due):
            raise ConfigurationError(
                f"variable {name!r} of the model has other first values {other}: seed what the script draws, {SEEDED}"
            )


def check_same_job(mine: LoadedJob, other: Job) -> None:
    """Refuse, in a worker, a call whose job differs from the run's."""
    different = different_key(mine, other, "in the process that started it")
    if different:
        raise ConfigurationError(f"this call is another one in this worker: {different}")


def different_key(mine: LoadedJob, other: Job, there: str = "there") -> str:
    """Return the first key that makes steps of two jobs differ, or ""; an open policy is taken from the other job."""
    theirs, own = _leaves(other), _leaves(mine.as_begun(other).job)
    for key in sorted(theirs.keys() | own.keys()):
        if key[0] in DEFINING and theirs.get(key) != own.get(key):
            said = _ARGUMENTS.get(".".join(key), ".".join(key))
            return f"{said} is {shown(own.get(key))} here and {shown(theirs.get(key))} {there}"
    return ""


def _leaves(job: Job) -> dict[tuple[str, ...], Any]:
    """Return a job's values by key; tables with all keys, since earlier versions omitted unset ones."""
    return dict(leaves({**job.plain(), "tables": {table.name: plain_of(table) for table in embedding_tables(job)}}))


def write_job_file(
    path: Path, table: Mapping[str, Any], model: Any, data: Any, variables: Mapping[str, Initial]
) -> None:
    """Write a job file with all values of a job; refuse a named model with other variables than the script's."""
    named = {"kind": model} if isinstance(model, str) else model
    if not isinstance(named, Mapping) or not isinstance(data, Mapping):
        raise ConfigurationError(
            'a job file names its model and its data, which this script has in memory: give model="module:factory", a '
            'function that returns the model, and data={"source": "csv", "path": "data.csv", "label": "price"}, say'
        )
    loaded = job_from_table({**table, "model": dict(named), "data": dict(data)}, path)
    job = loaded.job
    source = open_source(job.data)
    built = build_model(job.model, source.spec, job.job.seed, path.absolute().parent, embedding_tables(job))
    check_looks_up(built, {one.name: one for one in embedding_tables(job)})
    found = built.initial_variables()
    theirs, own = shapes_of(found), shapes_of(variables)
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            raise ConfigurationError(
                f"{job.model.kind!r} is another model than this trainer's: variable {name!r} has the shape "
                f"{theirs.get(name, 'of none')} there, and {own.get(name, 'of none')} here"
            )
    try:
        path.write_text(as_toml(job), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from None


def shapes_of(variables: Mapping[str, Initial]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's initial variables, by name."""
    return {name: parts_of(name, value)[0].shape for name, value in variables.items()}
