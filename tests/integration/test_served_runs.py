"""`parashard serve` and a subscriber, while a shard, the coordinator and the server itself are killed.

Each version that the subscriber has seen is compared with that checkpoint: no row is torn, and none is of another one.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import parashard as ps
from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.state import whole_model
from parashard.errors import ConfigurationError
from parashard.launch.stored_rows import whole_table
from parashard.protocol.coordinator_client import find_coordinator
from parashard.security.identity import OF_A_JOB, Role
from parashard.store import open_store
from support.certificates import Certificates
from support.cluster_run import DEADLINE_S, ClusterRun, eventually, sets
from support.long_job import LongJob
from support.served_process import EXAMPLES, SHARED, Server, Witness, due, store_of

Start = Callable[..., ClusterRun]
QUICK = 300  # steps of 768
FEW = 128


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(place: object, *arguments: str) -> Server:
        servers.append(Server(str(place), tmp_path / f"serve-{len(servers)}.out", *arguments))
        return servers[-1]

    yield make
    for server in servers:
        server.end()


def test_a_subscriber_through_kills_never_sees_a_torn_row_nor_an_older_version(
    start_run: Start, serve: Callable[..., Server], tmp_path: Path
) -> None:
    job = LongJob(tmp_path, "row_ledger.toml", QUICK)
    run = start_run(job.file, *sets(data__examples=EXAMPLES, checkpoint__every_s=0.2, checkpoint__keep=10**6))
    run.wait_for_steps(10)
    server = serve(run.dir)
    with ps.subscribe(server.start(), timeout_s=DEADLINE_S) as held:
        witness = Witness(held)
        run.wait_for_steps(100)
        for role, label in (("shard", "0"), ("coordinator", "coordinator"), ("shard", "1")):
            begun = held.versions
            pid = eventually(lambda role=role, label=label: run.pids(role).get(label), f"{role} {label} runs")
            run.kill(role, label)
            eventually(
                lambda role=role, label=label, pid=pid: run.pids(role).get(label) not in (None, pid),
                "it is started again",
            )
            if role == "shard":
                shard = int(label)
                number = begun[shard].number + 3
                held.wait_for(
                    lambda held, shard=shard, number=number: held.versions[shard].number >= number, DEADLINE_S
                )
        server.end()
        held.wait_for(lambda held: bool(held.problem), DEADLINE_S)
        job.let_end()
        report = run.report()
        server.start()
        held.wait_for(lambda held: held.done, DEADLINE_S)
        witness.stop()
        assert server.end(signal.SIGINT) == 0
        catalogue = store_of(run)
        newest = catalogue.newest_job_manifest()
        keys, rows = whole_table(catalogue, newest, "ledger")
        assert held.look_up("ledger", keys).present.all()
        assert held.rows("ledger", keys).tobytes() == rows.tobytes()
        assert len(rows) == EXAMPLES + SHARED == report["rows"]["ledger"]
        assert held.variable("entries").tobytes() == whole_model(catalogue.store, newest)["entries"].tobytes()
    assert (report["rows_wrong"], report["shard_restarts"], report["coordinator_restarts"]) == (0, 2, 1)
    for earlier, later in zip(witness.seen, witness.seen[1:], strict=False):
        assert all(now >= was for now, was in zip(later, earlier, strict=True)), (earlier, later)
    assert {id_.incarnation for id_ in witness.rows} > {1}
    assert all(sum(id_.shard == shard for id_ in witness.rows) > 3 for shard in range(2))
    for id_, found in witness.rows.items():
        assert list(found) == [due(catalogue, id_, 2)], id_


def test_a_run_that_is_over_is_served(start_run: Start, serve: Callable[..., Server]) -> None:
    run = start_run("examples/digits.toml", *sets(job__epochs=1))
    run.report()
    server = serve(run.dir)
    with ps.subscribe(server.start(), timeout_s=DEADLINE_S) as held:
        assert (held.done, held.behind) == (True, (0, 0.0))
        catalogue = store_of(run)
        for name, values in whole_model(catalogue.store, catalogue.newest_job_manifest()).items():
            assert held.variable(name).tobytes() == values.tobytes()

    assert server.end(signal.SIGTERM) == 0


def test_live_weights_through_a_kill_are_the_shards_own_and_a_return_is_told(
    start_run: Start, serve: Callable[..., Server], tmp_path: Path
) -> None:
    """The shard comes back without steps that were served. Versions that a checkpoint has are compared with it."""
    job = LongJob(tmp_path, "row_ledger.toml", QUICK)
    run = start_run(job.file, *sets(data__examples=EXAMPLES, checkpoint__every_s=0.2, checkpoint__keep=10**6))
    run.wait_for_steps(10)
    server = serve(find_coordinator(str(run.dir)), "--fresh")
    with ps.subscribe(server.start(), timeout_s=DEADLINE_S) as held:
        assert held.fresh
        witness = Witness(held)
        run.wait_for_steps(100)
        run.kill("shard", "0")
        held.wait_for(lambda held: held.resyncs > 0 and not held.problem, DEADLINE_S)
        assert held.versions[0].incarnation > 1
        run.wait_for_steps(QUICK + 4)  # from here on a step takes a second, so that checkpoints find its version
        catalogue = store_of(run)
        compared: dict[int, set[int]] = {0: set(), 1: set()}

        def compare() -> bool:
            for id_ in catalogue.checkpoints():
                manifest = catalogue.manifest(id_)
                live = CheckpointId(id_.plan_version, id_.shard, id_.incarnation, manifest.version)
                if live in witness.rows:
                    assert list(witness.rows[live]) == [due(catalogue, id_, 2)], live
                    compared[id_.shard].add(manifest.version)
            return min(map(len, compared.values())) >= 3 and max(compared[0]) > QUICK

        eventually(compare, "checkpoints have versions that were served")
        server.end()
        held.wait_for(lambda held: bool(held.problem), DEADLINE_S)
        server.start()
        held.wait_for(lambda held: not held.problem and held.behind.versions == 0, DEADLINE_S)
        assert (held.behind.seconds < DEADLINE_S, held.resyncs) == (True, 1)
        witness.stop()
    job.let_end()
    assert (run.report()["rows_wrong"], run.report()["shard_restarts"]) == (0, 1)
    assert all(len(found) == 1 for found in witness.rows.values()), "a version was seen with two contents"


def test_a_run_without_a_folder_is_served_from_a_bucket_inside_tls(
    start_run: Start, serve: Callable[..., Server], certificates: Certificates, tmp_path: Path, s3_url: str
) -> None:
    job = LongJob(tmp_path, "row_ledger.toml", quick_until=40)
    tls = {role: str(certificates.folder(role)) for role in (Role.SERVER, Role.READER, Role.WORKER)}
    sizes = sets(data__examples=FEW, checkpoint__every_s=1.0, checkpoint__url=s3_url)
    run = start_run(job.file, "--tls-dir", str(certificates.folder(OF_A_JOB)), *sizes)
    run.credentials = certificates.of(Role.OPERATOR)
    run.wait_for_steps(10)
    server = serve(find_coordinator(str(run.dir)), "--tls-dir", tls[Role.SERVER], "--log-format", "json")
    address = server.start()
    with ps.subscribe(address, timeout_s=DEADLINE_S, tls_dir=tls[Role.READER]) as held:
        with pytest.raises(ConfigurationError, match="this process is a reader"):
            ps.subscribe(address, tls_dir=tls[Role.WORKER])
        job.let_end()
        report = run.report()
        held.wait_for(lambda held: held.done, DEADLINE_S)
        catalogue = Catalogue(open_store(s3_url))
        keys, rows = whole_table(catalogue, catalogue.newest_job_manifest(), "ledger")
        assert held.rows("ledger", keys).tobytes() == rows.tobytes()
        assert len(rows) == FEW + SHARED == report["rows"]["ledger"]
    assert server.end(signal.SIGTERM) == 0
    assert '"event": "published"' in server.said()
