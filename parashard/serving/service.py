"""The gRPC service `Serving`: decodes, looks up, encodes; decides nothing. Started by `parashard.serving.server`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import numpy as np

from parashard._proto import serving_pb2 as pb
from parashard._proto import serving_pb2_grpc
from parashard.errors import LimitExceeded, QueueFull, WrongRun, shortened
from parashard.plan.partition import ELEMENT_BYTES
from parashard.serving import messages
from parashard.serving.checkpoint_watcher import Published
from parashard.serving.differences import difference, lacks
from parashard.serving.served import ANSWER_BYTES_MAX, ServedRun
from parashard.serving.versions import check_variable, elements_of

SUBSCRIBERS_MAX = 32
"""Most subscriptions that wait or send at once: each may hold a version that is no longer served."""


class ServingService(serving_pb2_grpc.ServingServicer):
    """Answers from a run's published versions."""

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._subscribers = threading.BoundedSemaphore(SUBSCRIBERS_MAX)

    def GetServed(self, request: pb.GetServedRequest, context: grpc.ServicerContext) -> pb.GetServedReply:
        """Return the run that is served, its tables, variables and versions."""
        published = self._run.published()
        variables = [
            pb.ServedVariable(name=name, shape=variable.shape) for name, variable in sorted(published.variables.items())
        ]
        return pb.GetServedReply(
            run_id=self._run.watcher.run_id,
            job=self._run.job,
            seed=self._run.tables.seed,
            tables=messages.table_messages(self._run.tables, published),
            variables=variables,
            sight=self._sight(published),
            fresh=self._run.watcher.fresh,
        )

    def GetRows(self, request: pb.GetRowsRequest, context: grpc.ServicerContext) -> pb.GetRowsReply:
        """Return rows of a table."""
        published, found = self._run.look_up(request.table, messages.keys_of(request.keys))
        return pb.GetRowsReply(
            row_elements=found.rows.shape[1],
            rows=messages.bytes_of(found.rows),
            present=found.present.astype(np.uint8).tobytes(),
            versions=[messages.version_message(version) for version in published.versions],
        )

    def GetVariable(self, request: pb.GetVariableRequest, context: grpc.ServicerContext) -> pb.GetVariableReply:
        """Return elements of a variable."""
        published = self._run.published()
        check_variable(published.variables, request.variable)
        variable = published.variables[request.variable]
        most = ANSWER_BYTES_MAX // ELEMENT_BYTES
        stop = request.first + (request.elements or min(most, max(0, variable.elements - request.first)))
        if stop - request.first > most or stop > variable.elements:
            raise LimitExceeded(
                f"elements [{request.first}, {stop}) of variable {request.variable!r}; allowed: within "
                f"[0, {variable.elements}), at most {most} at once"
            )
        return pb.GetVariableReply(
            shape=variable.shape,
            values=messages.bytes_of(elements_of(variable, published.shards, request.first, stop)),
            versions=[messages.version_message(version) for version in published.versions],
        )

    def Subscribe(self, request: pb.SubscribeRequest, context: grpc.ServicerContext) -> Iterator[pb.SubscribeReply]:
        """Wait for newer versions than the caller's, and yield the differences."""
        if request.run_id and request.run_id != self._run.watcher.run_id:
            raise WrongRun(f"run {self._run.watcher.run_id!r} is served here, not {shortened(request.run_id)!r}")
        if request.fresh != self._run.watcher.fresh:
            kinds = "committed versions", "live ones (--fresh)"
            raise WrongRun(
                f"{kinds[self._run.watcher.fresh]} are served here; the subscriber has {kinds[request.fresh]}"
            )
        self._run.tables.check(request.tables)
        if not self._subscribers.acquire(blocking=False):
            raise QueueFull(f"{SUBSCRIBERS_MAX} subscribers are served already")
        try:
            published = self._run.wait(
                lambda now: bool(lacks(now.shards, request.held)), request.wait_s, asks=context.is_active
            )
            for name in request.variables:
                check_variable(published.variables, name)
            wanted = set(request.tables), set(request.variables)
            for shard in lacks(published.shards, request.held):
                yield from difference(shard, len(published.shards), *wanted, request.held)
            yield pb.SubscribeReply(sight=self._sight(published))
        finally:
            self._subscribers.release()

    def _sight(self, published: Published) -> pb.Sight:
        return messages.sight_message(published, self._run.watcher.sight, self._run.now_s)
