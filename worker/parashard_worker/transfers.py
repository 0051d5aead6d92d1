"""Transfers: the pull and the push of a leased step, and the report of a failed one.

Knows no model; may be called in any thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from parashard._proto import coordinator_pb2 as pb
from parashard.client.pulled import Pulled
from parashard.client.shard_client import ShardClient
from parashard.errors import InvalidRequest, JobFailed, ParashardError, RetryLater, StaleRequest, TooEarly
from parashard.plan.embedding import Keys
from parashard.plan.variables import Float32s
from parashard.process import failpoints
from parashard.process.cuda_faults import GpuFault, fault_of
from parashard.process.logs import log
from parashard.protocol.messages import NO_KEYS
from parashard_worker.gpu_copies import NotCopied, PendingGradients
from parashard_worker.leasing import Leasing

Arrived = Callable[[Mapping[str, Float32s]], Mapping[str, Float32s]]


class Transfers:
    """One worker's pulls and pushes.

    `arrived` is called with the variables of each completed pull, and returns them: a GPU begins to copy them. A push
    waits for the copy of a GPU's gradients to the host.
    """

    def __init__(
        self, client: ShardClient, leasing: Leasing, round_steps: int | None, arrived: Arrived | None = None
    ) -> None:
        self._arrived = arrived
        self._client = client
        self._leasing = leasing
        self._round_steps = round_steps
        self._adding = threading.Lock()
        self.transfer_s = 0.0
        """Total duration of all pulls and pushes, overlapped or not; without waits for other workers."""
        self.staleness_pushes = 0
        """Sum over all pushes of the largest staleness among the shards."""

    def pull(self, grant: pb.Grant, keys: Mapping[str, Keys] = NO_KEYS) -> Pulled | None:
        """Pull a step's weights after its lease, which bounds the staleness; a step to skip needs none."""
        # `keys` name the rows of tables that the step needs, as in `ShardClient.pull`.
        if self._leasing.view > self._client.view.number:
            # Acks of a superseded incarnation, which may still be running, do not count.
            self._client.refresh()
        if grant.skip:
            return None
        round_ = grant.step // self._round_steps if self._round_steps else None
        started_s, waited_s = time.perf_counter(), 0.0
        try:
            pulled = self._client.pull(step=grant.step, round_=round_, keys=keys, least_version=grant.least_version)
            waited_s = pulled.waited_s
        except TooEarly:
            waited_s = math.inf  # the whole call was waiting
            raise
        finally:
            with self._adding:
                self.transfer_s += max(0.0, time.perf_counter() - started_s - waited_s)
        if self._arrived is not None:
            pulled.variables = self._arrived(pulled.variables)
        failpoints.hit("worker.pull.done")
        return pulled

    def push(
        self,
        grant: pb.Grant,
        gradients: Mapping[str, Float32s] | PendingGradients | None,
        pulled: Pulled | None,
    ) -> tuple[int, ...]:
        """Push a step to all shards, and return the incarnations that have it; without `gradients`, change nothing."""
        arrays: Mapping[str, Any]
        if isinstance(gradients, PendingGradients):
            arrays, norm = gradients.wait(), gradients.norm  # views of `gradients`
        else:
            arrays, norm = gradients or {}, None
        started_s = time.perf_counter()
        try:
            pushed = self._client.push(
                grant.step,
                arrays,
                pulled,
                skipped=grant.skip,
                void=gradients is None and not grant.skip,
                learning_rate=grant.learning_rate or None,
                norm=norm,
            )
        finally:
            with self._adding:
                self.transfer_s += time.perf_counter() - started_s
        with self._adding:
            self.staleness_pushes += max((r.staleness or 0 for r in pushed.acks), default=0)
        failpoints.hit("worker.push.done")
        return pushed.incarnations

    def pull_refused(self, step: int, error: InvalidRequest) -> None:
        """Give back a step whose pull was refused: another server replied, so the attempt does not count as failed."""
        log.warning("pull-refused", step=step, error=str(error))
        self._leasing.dropped(step)
        self._client.refresh()

    def report_failure(self, step: int, error: ParashardError) -> None:
        """Report a step whose pull or push failed, according to the kind of error; raise an unexpected error."""
        if isinstance(error, NotCopied) and fault_of(error) is GpuFault.LOST_CONTEXT:
            # The next step reports the lost context and ends the worker; this step is not to blame.
            log.warning("step-dropped", step=step, error=str(error))
            self._leasing.dropped(step)
        elif isinstance(error, InvalidRequest | NotCopied):
            self._leasing.failed(step, str(error))
        elif isinstance(error, JobFailed):  # such as a full table (P34): a retry cannot succeed
            self._leasing.failed(step, str(error), pb.FAILURE_KIND_WRONG_RESULT)
        elif isinstance(error, TooEarly):
            self._leasing.dropped(step, queue_too=True)  # an earlier step must come first
        elif isinstance(error, StaleRequest | RetryLater):
            # The round has ended, or the shard has another incarnation: the step will be leased again, with a newer
            # view.
            log.info("step-dropped", step=step, error=str(error))
            self._leasing.dropped(step)
            self._client.refresh()
        else:
            raise error
