"""Statuses of made-up jobs, of any size: what the tests of the screens share."""

from __future__ import annotations

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2

DEVICE = "cuda:0 NVIDIA H200"


def status_of(**more: object) -> pb.GetStatusReply:
    """Return the status of a job with two workers and two shards, of which the second ones are down."""
    fields: dict[str, object] = {
        "job": "digits",
        "state": pb.JOB_STATE_RUNNING,
        "steps_total": 1000,
        "steps_complete": 250,
        "steps_leased": 8,
        "examples_per_s": 12345.6,
        "elapsed_s": 10.0,
        "training_loss": 0.123456,
        "held_out": {"accuracy": 0.97},
        "staleness_p50": 1,
        "staleness_p95": 3,
        "staleness_max": 7,
        "step_lag_max": 4,
        "workers_wanted": 2,
        "consistency": "ssp:8",
        "http_address": "127.0.0.1:9",
        "workers": [worker_of(0, device="cpu"), worker_of(1, live=False, device="cpu", restarts=2)],
        "shards": [shard_of(0), shard_of(1, live=False)],
        "events": ["worker-1 ended: killed by SIGKILL"],
        "events_total": 1,
    }
    return pb.GetStatusReply(**(fields | more))  # type: ignore[arg-type]


def crowd_of(workers: int, shards: int, down: frozenset[int] = frozenset(), **more: object) -> pb.GetStatusReply:
    """Return the status of a busy job with so many workers, of which these are down, and so many shards."""
    return status_of(
        workers=[worker_of(i, live=i not in down) for i in range(workers)],
        shards=[shard_of(i) for i in range(shards)],
        workers_wanted=workers,
        **more,
    )


def worker_of(number: int, *, live: bool = True, device: str = DEVICE, restarts: int = 0) -> pb.WorkerStatus:
    """Return a worker that computes."""
    return pb.WorkerStatus(
        name=f"worker-{number}",
        live=live,
        device=device,
        steps_complete=12345,
        steps_held=8,
        restarts=restarts,
        examples_per_s=12345.6,
        phases=pb.PhaseSeconds(lease=1, pull=2, compute=6, push=1, transfer=6),
    )


def shard_of(number: int, *, live: bool = True) -> pb.ShardStatus:
    """Return a shard that has been sent 16 GiB."""
    record = shard_pb2.InspectReply(
        version=12345,
        variable_bytes=3 << 20,
        slot_bytes=1 << 20,
        push_bytes=1 << 34,
        push_float32_bytes=4 << 34,
        pull_bytes=1 << 34,
        duplicate_pushes=12,
    )
    address = f"10.0.0.{number}:40000"
    return pb.ShardStatus(shard=number, registered=True, live=live, address=address, record=record)
