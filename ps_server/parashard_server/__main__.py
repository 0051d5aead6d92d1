"""Starts a shard: ask for the job, claim an incarnation, restore, listen, and announce the shard once a second.

A restarted coordinator learns of the shard from the announcement, and the shard learns from its answer that the job is
done; with `--linger-s` it ends then. SIGTERM: accept nothing more, save, exit 0. Steps that its next incarnation lacks,
in sync mode those of a round that was not complete, are computed again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.retention import CommonRounds
from parashard.client.proto_conversion import interval_messages
from parashard.errors import ParashardError, PeerFailed, RetryLater
from parashard.process import failpoints
from parashard.process.addresses import advertised_beside, advertised_for, join_address, listen
from parashard.process.arguments import advertised_address
from parashard.process.logs import log
from parashard.process.own_address import watch_address
from parashard.process.resources import MESSAGES, keep_freed_memory, limit_threads
from parashard.process.shell import ExitCode, Stop, end_process, run_service
from parashard.process.starts import ShardStart
from parashard.protocol.coordinator_client import CoordinatorClient, client_of
from parashard.protocol.rpc import Server
from parashard.security.given_credentials import credentials_of
from parashard.security.identity import Role
from parashard.store import open_store
from parashard.store.claims import Claims
from parashard.telemetry.http import HttpPort, Metrics
from parashard.telemetry.tracing import tracing
from parashard_server.build import ShardBuilder
from parashard_server.core.shard import Shard
from parashard_server.durability.checkpointer import Checkpointer
from parashard_server.durability.lifecycle import ShardLifecycle
from parashard_server.metrics import shard_families
from parashard_server.serving.grpc_service import ShardService
from parashard_server.serving.listeners import Listeners
from parashard_server.serving.request_handler import RequestHandler

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

ANNOUNCE_S = 1.0
ANNOUNCE_AGAIN_S = 0.1  # without an answer
LOOK_S = 0.05


def main() -> int:
    """Run one shard and return its exit code."""
    start = ShardStart.read()
    keep_freed_memory(MESSAGES)
    role = f"shard-{start.index}"

    def traced(stop: Stop) -> ExitCode:
        with tracing(start.trace, "shard", role) as tracer:
            return serve(start, stop, tracer)

    return run_service(role, start.lifeline, traced, start.stopped_exit_code, start.log_format)


def serve(start: ShardStart, stop: Stop, tracer: Tracer | None) -> ExitCode:
    """Serve one shard until asked to stop."""
    credentials = credentials_of(start, Role.SHARD)
    coordinator = client_of(start, stop, credentials)
    reply = coordinator.get_job()
    store = open_store(reply.checkpoint_url)
    catalogue = Catalogue(store).of_run(reply.run_id)
    builder = ShardBuilder(reply, start.index, store, device=start.device)
    coordinator.retry_budget_s = builder.job.cluster.retry_budget_s
    claims = Claims(store, f"shard-{start.index}", os.urandom(8).hex())
    lifecycle = ShardLifecycle(builder, reply, catalogue, claims, cancelled=stop.event)
    host, checkpointer = lifecycle.host, lifecycle.checkpointer
    limit_threads(1)
    plane = RequestHandler(host, lifecycle, tracer)
    ports = Listeners(plane, host, builder.job, builder.push_memory, start.host, start.data_port, credentials)
    service = ShardService(plane, host, checkpointer, lifecycle, builder.push_memory)
    server = listen(start.port, lambda port: Server(join_address(start.host, port), credentials))
    service.add_to(server)
    refused = {
        "calls": lambda: server.admission.refused,
        "connections": lambda: ports.turned_away,
        "slow": lambda: server.admission.slow,
    }
    metrics = Metrics("shard", credentials, refused)
    metrics.add(partial(shard_families, host, builder.push_memory, checkpointer.record))
    announced = False
    http = HttpPort(
        start.host,
        start.http_port,
        metrics,
        lambda: "" if announced else "not registered with the coordinator",
        advertise=start.advertise,
    )
    server.start()
    ports.start()
    http.start()
    watch_address(start.host, stop)
    where = pb.ShardAddress(
        address=advertised_address(start, server.address, ports.address, stop.event),
        data_address=advertised_for(start.advertise_data, advertised_beside(start.advertise, ports.address)),
        local_path=ports.local_path,
    )
    announcer = _Announcer(coordinator, lifecycle, service, where, http.address, start.linger_s)
    coordinator.retry(announcer.announce)
    announced = True
    failpoints.hit("shard.boot.registered")
    checkpointer.start()
    elements = host.shard.storage.elements
    log.info("serving", address=where.address, data=where.data_address, http=http.address, elements=elements)
    with _stopped_by_errors(ports):
        announcer.run(stop)
    log.info("stopping", reason=stop.reason if stop.asked else "the job is done")
    plane.draining = True
    with _ends_in_time(builder.job.cluster.grace_s):
        _save(checkpointer)
        server.stop()
        ports.stop()
        http.stop()
        coordinator.close()
    return ExitCode.DONE


@contextmanager
def _stopped_by_errors(ports: Listeners) -> Iterator[None]:
    """Stop the ports if the block fails, which removes the name under /dev/shm."""
    try:
        yield
    except BaseException:
        ports.stop()
        raise


def _save(checkpointer: Checkpointer) -> None:
    failpoints.hit("shard.stop.saving")
    checkpointer.stop()
    try:
        checkpointer.take()
    except ParashardError as error:
        log.warning("not-saved", error=str(error))  # the last checkpoint counts; steps that it lacks are computed again


@contextmanager
def _ends_in_time(grace_s: float) -> Iterator[None]:
    """End the process if saving exceeds the grace period: the last checkpoint counts then."""
    late = threading.Timer(grace_s, end_process, (ExitCode.RETRY,))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


class _Announcer:
    """Reports the shard's steps to the coordinator, and receives the rounds that all shards have saved."""

    def __init__(
        self,
        coordinator: CoordinatorClient,
        lifecycle: ShardLifecycle,
        service: ShardService,
        where: pb.ShardAddress,
        http_address: str,
        linger_s: float,
    ) -> None:
        self._coordinator = coordinator
        self._lifecycle = lifecycle
        self._host = lifecycle.host
        self._service = service
        self._where = where
        self._http_address = http_address
        self._linger_s = linger_s
        self._ends_s = math.inf

    def announce(self) -> None:
        """Announce once."""
        reply = self._coordinator.register_shard(self._host.run_exclusive(self._request))
        cut_round = reply.cut_round if reply.HasField("cut_round") else None
        self._lifecycle.checkpointer.saved.common = CommonRounds(cut_round, frozenset(reply.kept_rounds))
        self._service.coordinator_incarnation = max(
            self._service.coordinator_incarnation, reply.coordinator_incarnation
        )
        if reply.state == pb.JOB_STATE_DONE:
            self._ends_s = min(self._ends_s, time.monotonic() + self._linger_s)

    def run(self, stop: Stop) -> None:
        """Announce once a second, at once to a new coordinator or after a change, until a stop or the job's end.

        Raises Fenced if a newer incarnation of the shard, or another run, has replaced this one, or another process has
        claimed the shard, so that this one can save nothing any more; PeerFailed if the coordinator has answered this
        shard only with internal errors for the retry budget.
        """
        next_s, failing_since_s = time.monotonic() + ANNOUNCE_S, math.inf
        while not stop.asked and time.monotonic() < self._ends_s:
            if self._lifecycle.claims.superseded is not None:
                raise self._lifecycle.claims.superseded
            changed = self._host.changed.wait(LOOK_S)
            if changed or time.monotonic() >= next_s or self._coordinator.reconnect_if_moved():
                self._host.changed.clear()
                next_s = time.monotonic() + ANNOUNCE_S
                try:
                    self.announce()
                    failing_since_s = math.inf
                except RetryLater:
                    next_s = time.monotonic() + ANNOUNCE_AGAIN_S
                except PeerFailed as error:  # the shard's state is worth more than one failed call
                    self._host.shard.record.failed_announcements += 1
                    log.warning("announcement-failed", error=str(error))
                    now_s = time.monotonic()
                    failing_since_s = min(failing_since_s, now_s)
                    if now_s - failing_since_s > self._coordinator.retry_budget_s:
                        raise

    def _request(self, shard: Shard) -> pb.RegisterShardRequest:
        mine = shard.identity
        returnable, chains = self._lifecycle.saved_rounds()
        return pb.RegisterShardRequest(
            run_id=mine.run_id,
            job_digest=mine.job_digest,
            shard=mine.shard,
            incarnation=mine.incarnation,
            first_incarnation=self._lifecycle.first_incarnation,
            address=self._where.address,
            data_address=self._where.data_address,
            local_path=self._where.local_path,
            http_address=self._http_address,
            applied=interval_messages(shard.updates.applied),
            held=interval_messages(shard.updates.held),
            skipped=interval_messages(shard.updates.skipped),
            checkpoint_rounds=returnable,
            chain_rounds=chains,
            restored=self._host.restored,
        )


if __name__ == "__main__":
    end_process(main())
