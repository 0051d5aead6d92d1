"""Starts a shard: claim an incarnation, ask for the job, fill the variables, listen, register, serve."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import structlog

from parashard.claims import claim_incarnation
from parashard.compute import limit_threads
from parashard.contracts import interval_messages
from parashard.coordinator_client import CoordinatorClient, find_coordinator
from parashard.process import ExitCode, Stop, check_host, end_process, run_service, service_arguments
from parashard.rpc import Server, join_address
from parashard.telemetry.http import HttpPort, new_registry
from protos import coordinator_pb2 as pb
from ps_server.build import build_shard
from ps_server.metrics import ShardCollector
from ps_server.owner import Owner
from ps_server.service import ShardService

WAIT_S = 3600.0

log = structlog.get_logger("shard")


def main() -> int:
    """Run one shard and return its exit code."""
    parser = service_arguments("One parashard shard: holds variables and applies pushes.")
    parser.add_argument("--connect", required=True, help="the coordinator: host:port, or a run directory")
    parser.add_argument("--index", required=True, type=int, help="which shard of the plan this is")
    parser.add_argument("--state", required=True, type=Path, help="folder where lives are claimed")
    arguments = parser.parse_args()
    return run_service(f"shard-{arguments.index}", arguments.lifeline, lambda stop: serve(arguments, stop))


def serve(arguments: Namespace, stop: Stop) -> ExitCode:
    """Serve one shard until asked to stop."""
    check_host(arguments.host, arguments.insecure)
    incarnation = claim_incarnation(arguments.state, f"shard-{arguments.index}")  # P3
    coordinator = CoordinatorClient(find_coordinator(arguments.connect, giving_up=stop.event), giving_up=stop.event)
    reply = coordinator.get_job()
    shard, job = build_shard(reply, arguments.index, incarnation)
    limit_threads(1)
    service = ShardService(shard, Owner(job.cluster.queue_pushes))
    server = Server(join_address(arguments.host, arguments.port))
    service.add_to(server)
    registry = new_registry("shard")
    registry.register(ShardCollector(shard))
    registered = False
    http = HttpPort(
        arguments.host,
        arguments.http_port,
        registry,
        lambda: "" if registered else "not registered with the coordinator",
    )
    server.start()
    http.start()
    coordinator.register_shard(
        pb.RegisterShardRequest(
            run_id=reply.run_id,
            job_digest=reply.job_digest,
            shard=arguments.index,
            incarnation=incarnation,
            address=server.address,
            http_address=http.address,
            applied=interval_messages(shard.ingest.applied),
        )
    )
    registered = True
    log.info(
        "serving",
        address=server.address,
        http=http.address,
        incarnation=incarnation,
        partitions=len(shard.storage.layout),
        elements=shard.storage.elements,
    )
    while not stop.wait(WAIT_S):
        pass
    log.info("stopping", reason=stop.reason)
    service.draining = True
    server.stop()
    http.stop()
    coordinator.close()
    return ExitCode.DONE


if __name__ == "__main__":
    end_process(main())
