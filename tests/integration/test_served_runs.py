"""`parashard serve` and a subscriber, while a shard, the coordinator and the server itself are killed.

Each version that the subscriber has seen is compared with that checkpoint: no row is torn, and none is of another one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import parashard as ps
from parashard.api.subscription import Subscription
from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.state import whole_model
from parashard.checkpoints.tables import iterate_rows
from parashard.launch.stored_rows import whole_table
from parashard.plan.embedding import cut_by_shard, mixed, unmixed
from parashard.store import open_store
from support.cluster_run import DEADLINE_S, ClusterRun, eventually, sets
from support.command_run import DIES_WITH_US, ROOT
from support.long_job import LongJob

Start = Callable[..., ClusterRun]
EXAMPLES, SHARED = 1024, 7
QUICK = 300  # steps of 768
KEYS = np.sort(mixed(np.concatenate([np.arange(EXAMPLES), (1 << 62) + np.arange(SHARED), [-1]])))
"""Mixed, all that can have a row, and one that never has."""


class Server:
    """`parashard serve` in a process of its own, one after another at the ports that the first one found."""

    def __init__(self, run_dir: Path, out: Path) -> None:
        self._run_dir, self._out = run_dir, out
        self.process: subprocess.Popen[bytes] | None = None
        self.ports = [0, 0]

    def start(self) -> str:
        """Start it and return its address once it listens."""
        words = ["serve", str(self._run_dir), "--port", str(self.ports[0]), "--http-port", str(self.ports[1])]
        with self._out.open("wb") as out:
            command = [*DIES_WITH_US, sys.executable, "-m", "parashard", *words]
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )
        said = eventually(lambda: re.search(r"gRPC \S+:(\d+)\nHTTP \S+:(\d+)/", self._out.read_text()), "it listens")
        self.ports = [int(port) for port in said.groups()]
        return f"127.0.0.1:{self.ports[0]}"

    def end(self, number: int = signal.SIGKILL) -> int:
        """End it and return its exit code."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.send_signal(number)
        return process.wait(DEADLINE_S)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Path], Server]]:
    servers: list[Server] = []

    def make(run_dir: Path) -> Server:
        servers.append(Server(run_dir, tmp_path / f"serve-{len(servers)}.out"))
        return servers[-1]

    yield make
    for server in servers:
        server.end()


class Witness:
    """A thread that looks every key up, again and again, and keeps what it has seen of each version."""

    def __init__(self, held: Subscription) -> None:
        self._held = held
        self.seen: list[tuple[CheckpointId, ...]] = []
        self.rows: dict[CheckpointId, dict[bytes, int]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stopping.set()
        self._thread.join()

    def _look(self) -> None:

        keys = unmixed(KEYS)
        while not self._stopping.wait(0.005):
            found = self._held.look_up("ledger", keys)
            self.seen.append(found.versions)
            for id_, mine in zip(found.versions, cut_by_shard(KEYS, len(found.versions)), strict=True):
                bits = found.rows[mine].tobytes() + found.present[mine].tobytes()
                self.rows.setdefault(id_, {})[bits] = self.rows.get(id_, {}).get(bits, 0) + 1


def due(catalogue: Catalogue, id_: CheckpointId, shards: int) -> bytes:
    """Return what a look-up of a version finds of its shard's keys: what the manifest alone says."""
    mine = KEYS[cut_by_shard(KEYS, shards)[id_.shard]]
    rows, present = np.zeros((len(mine), 2), np.float32), np.zeros(len(mine), np.bool_)
    for _, stored in iterate_rows(catalogue.store, catalogue.manifest(id_)):
        places = np.searchsorted(mine, stored.keys)
        rows[places], present[places] = stored.values, True
    return rows.tobytes() + present.tobytes()


def store_of(run: ClusterRun) -> Catalogue:
    return Catalogue(open_store(str(run.dir / "checkpoints")))


def test_a_subscriber_through_kills_never_sees_a_torn_row_nor_an_older_version(
    start_run: Start, serve: Callable[[Path], Server], tmp_path: Path
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


def test_a_run_that_is_over_is_served(start_run: Start, serve: Callable[[Path], Server]) -> None:
    run = start_run("examples/digits.toml", *sets(job__epochs=1))
    run.report()
    server = serve(run.dir)
    with ps.subscribe(server.start(), timeout_s=DEADLINE_S) as held:
        assert (held.done, held.behind) == (True, (0, 0.0))
        catalogue = store_of(run)
        for name, values in whole_model(catalogue.store, catalogue.newest_job_manifest()).items():
            assert held.variable(name).tobytes() == values.tobytes()

    assert server.end(signal.SIGTERM) == 0
