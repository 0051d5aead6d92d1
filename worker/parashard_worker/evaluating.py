"""Evaluating: a granted evaluation, from its pull to its report.

Knows no step. Called by `parashard_worker.loop` and `parashard_worker.session`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parashard._proto import coordinator_pb2 as pb
from parashard.client.shard_client import ShardClient
from parashard.errors import InvalidRequest, RetryLater, StaleIncarnation, StaleRequest
from parashard.models.framework import WrongModel
from parashard.models.user_errors import described
from parashard.plan.variables import Float32s
from parashard.process.logs import log
from parashard_worker.computing import Task, WrongResult
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
    leasing.evaluated(grant, metrics, weights=weights, judged_steps=judged_steps)


def _failed(grant: pb.EvaluationGrant, leasing: Leasing, error: BaseException) -> None:
    log.warning("evaluation-failed", evaluation=grant.evaluation, exc_info=error)
    wrong = isinstance(error, WrongResult | WrongModel)  # by the shapes: a retry would fail, too
    kind = pb.FAILURE_KIND_WRONG_RESULT if wrong else pb.FAILURE_KIND_MODEL
    leasing.evaluated(grant, {}, described(error), kind)
