"""Where a served run comes from: a coordinator's address says it, and the store it names has to be that run's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import parashard as ps
from parashard._proto import coordinator_pb2 as pb
from parashard._proto import coordinator_pb2_grpc
from parashard.checkpoints.catalogue import RUN_NAME
from parashard.checkpoints.encoding import encode
from parashard.checkpoints.manifest import RunRecord
from parashard.client.proto_conversion import plan_message
from parashard.errors import ConfigurationError
from parashard.job.load import as_toml, load_job
from parashard.launch.run_folders import write_report
from parashard.protocol import rpc
from parashard.serving.served import ServedRun
from parashard.serving.server import Ports, run_at
from parashard.store import open_store
from support.checkpoint_cases import PLAN, model_of
from support.serving_cases import Committer, ShardLife
from support.small_job import SMALL_JOB
from support.waiting import DEADLINE_S


class FakeCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Answers what a job is."""

    def __init__(self, reply: pb.GetJobReply) -> None:
        self.reply = reply

    def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobReply:
        return self.reply


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[FakeCoordinator, str]]:
    """Return a coordinator of a job whose store is a folder, and its address."""
    file = tmp_path / "job.toml"
    file.write_text(SMALL_JOB)
    reply = pb.GetJobReply(
        run_id="run-1",
        job_toml=as_toml(load_job(file, [], {}).job),
        plan=plan_message(PLAN),
        checkpoint_url=str(tmp_path / "store"),
    )
    it, server = FakeCoordinator(reply), rpc.Server("127.0.0.1:0")
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(it, server.grpc)
    server.start()
    yield it, server.address
    server.stop(0.0)


def origin(address: str, *, fresh: bool = False) -> ServedRun:
    return run_at(address, fresh=fresh, credentials=None, tell=lambda why: None)


def begin(url: str, run_id: str = "run-1") -> None:
    """Begin a run in a store, and commit a checkpoint of each shard."""
    store = open_store(url)
    record = RunRecord(run_id=run_id, job_digest="d" * 64, identity={}, job_toml="", created_at=1.0)
    store.create(RUN_NAME, encode(record))
    committer = Committer(store)
    committer.write_plan()
    for shard in range(2):
        committer.commit(ShardLife(shard), [0], {})


def test_the_store_that_a_coordinator_tells_of_is_served_to_a_subscriber(
    coordinator: tuple[FakeCoordinator, str],
) -> None:
    it, address = coordinator
    begin(it.reply.checkpoint_url)
    found = origin(address)
    assert (found.job, found.watcher.fresh) == ("small", False)
    ports = Ports(found, "127.0.0.1", 0, 0)
    ports.start()
    try:
        with ps.subscribe(ports.address, timeout_s=DEADLINE_S) as held:
            assert held.variable("dense/bias").tobytes() == model_of(1)["dense/bias"].tobytes()
            assert found.watcher.run_id == "run-1"
    finally:
        ports.stop()


@pytest.mark.parametrize(("there", "told"), [(None, "there is no run"), ("run-2", "run run-2 is there")])
def test_a_store_that_is_not_that_runs_is_refused(
    coordinator: tuple[FakeCoordinator, str], there: str | None, told: str
) -> None:
    it, address = coordinator
    if there is not None:
        begin(it.reply.checkpoint_url, there)
    with pytest.raises(ConfigurationError, match=f"{told}; allowed: a store that this machine reaches"):
        origin(address)


def test_live_weights_need_no_store(coordinator: tuple[FakeCoordinator, str]) -> None:
    found = origin(coordinator[1], fresh=True)
    assert (found.job, found.watcher.fresh) == ("small", True)
    found.look()
    assert found.watcher.run_id == "run-1"
    assert "coordinator" in found.watcher.sight.problem  # which knows no shards


def test_live_weights_of_a_run_that_is_over_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(SMALL_JOB)
    write_report(tmp_path, {"state": "done", "reason": ""})
    with pytest.raises(ConfigurationError, match="the run is done, and its shards are gone with it; allowed: to serve"):
        origin(str(tmp_path), fresh=True)
    assert not origin(str(tmp_path)).watcher.fresh
