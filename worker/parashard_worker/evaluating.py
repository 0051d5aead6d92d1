"""Evaluating: a granted evaluation, from its pull to its report, and the file of the weights that it judged.

The weights are stored before their result is reported: what is best is then what was judged. Knows no step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue, evaluated_name
from parashard.client.shard_client import ShardClient
from parashard.errors import InvalidRequest, ParashardError, RetryLater, StaleIncarnation, StaleRequest, WrongModel
from parashard.models.user_errors import described
from parashard.plan.variables import Float32s, Variable, as_exported
from parashard.process.logs import log
from parashard.store import open_store
from parashard.store.arrays import to_bytes
from parashard_worker.computing import Task, WrongResult
from parashard_worker.leased import REASON_CHARACTERS_MAX
from parashard_worker.leasing import Leasing

Keep = Callable[[int, Mapping[str, Float32s]], str]
"""Stores evaluated weights, and returns their file in the store; "" where it could not."""


def evaluate(grant: pb.EvaluationGrant, task: Task, client: ShardClient, leasing: Leasing, keep: Keep) -> None:
    """Judge the weights that the grant names, and report it; keep them before, where the grant says so."""
    round_ = grant.round if grant.for_round else None
    try:
        with leasing.reading(grant):
            keys = task.held_out_keys()
    except BaseException as error:  # noqa: BLE001  # the model's code
        _failed(grant, leasing, error)
        return
    try:
        pulled = client.pull(round_=round_, keys=keys)
        if pulled.incarnations != tuple(grant.incarnations):
            raise StaleIncarnation("a shard has another incarnation than the one whose weights are to be judged")
    except (InvalidRequest, StaleRequest, RetryLater) as error:  # not the model's fault: another attempt may succeed
        log.info("evaluation-dropped", evaluation=grant.evaluation, error=str(error))
        leasing.evaluation_dropped(grant.evaluation)
        client.refresh()
        return
    try:
        metrics = task.metrics({**pulled.variables, **pulled.rows}, lambda: leasing.computing(grant), keys)
    except BaseException as error:  # noqa: BLE001  # the model's code
        _failed(grant, leasing, error)
        return
    weights = keep(grant.evaluation, pulled.variables) if grant.store else ""
    judged_steps = 0 if grant.for_round else min(pulled.versions) * task.steps.parts  # a version is a batch
    pulled.release()
    leasing.evaluated(result_of(grant, metrics=metrics, weights=weights, judged_steps=judged_steps))


def result_of(grant: pb.EvaluationGrant, **outcome: Any) -> pb.EvaluationResult:
    """Return the outcome of an evaluation of the weights that its grant names."""
    return pb.EvaluationResult(evaluation=grant.evaluation, incarnations=grant.incarnations, **outcome)


def _failed(grant: pb.EvaluationGrant, leasing: Leasing, error: BaseException) -> None:
    log.warning("evaluation-failed", evaluation=grant.evaluation, exc_info=error)
    wrong = isinstance(error, WrongResult | WrongModel)  # by the shapes: a retry would fail, too
    kind = pb.FAILURE_KIND_WRONG_RESULT if wrong else pb.FAILURE_KIND_MODEL
    leasing.evaluated(result_of(grant, error=described(error)[:REASON_CHARACTERS_MAX], kind=kind))


def keep_evaluated(
    checkpoint_url: str, run_id: str, variables: Mapping[str, Variable], evaluation: int, values: Mapping[str, Float32s]
) -> str:
    """Store weights under a name of their own and return it; "" where that fails (P21), which is logged.

    Nothing is written where the store is not the run's, as in a folder of the same name on another machine.

    The file is what a user is given: counters are whole numbers in it, as in `weights.safetensors`.
    """
    name = evaluated_name(evaluation, os.urandom(4).hex())
    arrays = {variable: np.ascontiguousarray(value) for variable, value in as_exported(values, variables).items()}
    try:
        store = open_store(checkpoint_url)
        Catalogue(store).of_run(run_id)
        store.create(name, to_bytes(arrays))
    except ParashardError as error:
        log.warning("evaluated-not-stored", evaluation=evaluation, error=str(error))
        return ""
    return name


def check_store(reply: pb.GetJobReply) -> None:
    """Raise ConfigurationError where this worker could not store the weights that the run's callbacks keep."""
    if reply.stores_evaluated:
        Catalogue(open_store(reply.checkpoint_url)).of_run(reply.run_id)
