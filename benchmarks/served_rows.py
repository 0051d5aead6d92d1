"""What `parashard serve` answers: look-ups of 1,000 keys, and how long a commit takes to a subscriber.

`python -m benchmarks.served_rows`. A table of a million rows of 16 numbers on two shards, written here as shards write
it, with a server in a process of its own. Look-ups over gRPC, over HTTP and of a subscription take turns; each is one
client that asks again when it has its answer, and checks it. A commit is an increment of 1,000 rows of one shard.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import parashard as ps
from benchmarks.tables import load_before, spread, table, write
from parashard._proto import serving_pb2 as pb
from parashard._proto import serving_pb2_grpc
from parashard.api.subscription import Subscription
from parashard.checkpoints.catalogue import CheckpointId, plan_name
from parashard.checkpoints.encoding import encode
from parashard.checkpoints.manifest import PlanRecord, ShardManifest, TableFile
from parashard.checkpoints.row_files import StoredRows, TableChange, TableWriter
from parashard.checkpoints.tensors import variable_tensor, write_tensors
from parashard.plan.embedding import Keys, cut_by_shard, mixed
from parashard.plan.partition import place, split, whole
from parashard.plan.variables import Variable
from parashard.protocol import rpc
from parashard.store import Store, open_store

DEADLINE_S = 120.0
ROWS, ELEMENTS, KEYS_AT_ONCE, SHARDS = 1_000_000, 16, 1000, 2
JOB = f"""
job = {{name = "served", epochs = 1, batch_size = 1}}
data = {{source = "synthetic"}}
model = {{kind = "row_ledger"}}
optimizer = {{kind = "sgd", learning_rate = 0.1}}
tables = {{ledger = {{dimension = {ELEMENTS}}}}}
"""
VARIABLES = {"bias": Variable("bias", (4,))}
PLAN = place(VARIABLES, split(VARIABLES, whole), SHARDS)


class Shard:
    """A shard that commits increments on request."""

    def __init__(self, store: Store, shard: int) -> None:
        self._store = store
        self._shard = shard
        self._rows = 0
        self._files: tuple[TableFile, ...] = ()
        self.number = 0

    def commit(self, keys: Keys, new_rows: int) -> float:
        """Write an increment of ascending keys; return when it was committed, by the monotonic clock."""
        self.number += 1
        self._rows += new_rows
        id_ = CheckpointId(1, self._shard, 1, self.number)
        held = PLAN.shards[self._shard]
        arrays = {variable_tensor(p): np.zeros((p.rows,), np.float32) for p in held}
        files = write_tensors(self._store, id_.folder, arrays, "variables")
        values = np.full((len(keys), ELEMENTS), self.number, np.float32)
        counts = np.ones(len(keys), np.uint32)
        writer = TableWriter(self._store, id_)
        rows = StoredRows(keys, counts, counts, values, {"accumulator": values})
        writer.write(TableChange("ledger", rows, np.empty(0, np.uint64)))
        self._files = (*self._files, *writer.files)
        manifest = ShardManifest(
            run_id="served",
            job_digest="0" * 64,
            plan_version=1,
            shard=self._shard,
            incarnation=1,
            number=self.number,
            round=None,
            version=self.number,
            applied=((0, self.number),),
            slots=(),
            partitions=tuple(held),
            files=tuple(files),
            written_at=time.time(),
            tables=(("ledger", self._rows),),
            table_files=self._files,
        )
        self._store.create(id_.manifest_name, encode(manifest))
        return time.monotonic()


def over_grpc(address: str) -> Callable[[Keys], int]:
    """Return a look-up by gRPC, which returns how many of its keys have a row."""
    stub = serving_pb2_grpc.ServingStub(rpc.connect(address))  # type: ignore[no-untyped-call]

    def look_up(keys: Keys) -> int:
        request = pb.GetRowsRequest(table="ledger", keys=keys.tobytes())
        found = stub.GetRows(request, timeout=DEADLINE_S)
        assert len(found.rows) == KEYS_AT_ONCE * ELEMENTS * 4
        return sum(found.present)

    return look_up


def over_http(address: str) -> Callable[[Keys], int]:
    """Return a look-up by HTTP; the server closes a connection after its answer."""

    def look_up(keys: Keys) -> int:
        connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
        connection.request("POST", "/v1/rows", json.dumps({"table": "ledger", "keys": keys.tolist()}))
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        assert len(found["rows"]) == KEYS_AT_ONCE
        return sum(found["present"])

    return look_up


def of_subscription(held: Subscription) -> Callable[[Keys], int]:
    """Return a look-up in a subscription's memory."""
    return lambda keys: int(held.look_up("ledger", keys).present.sum())


def measure_look_ups(look_up: Callable[[Keys], int], seconds: float, seed: int) -> float:
    """Return look-ups a second."""
    draw = np.random.default_rng(seed)
    count, until_s = 0, time.perf_counter() + seconds
    begin_s = time.perf_counter()
    while time.perf_counter() < until_s:
        assert look_up(draw.integers(0, ROWS, KEYS_AT_ONCE).astype(np.uint64)) == KEYS_AT_ONCE
        count += 1
    return count / (time.perf_counter() - begin_s)


def measure_delay(shard: Shard, keys: Keys, held: Subscription) -> float:
    """Return the seconds from a commit until a subscriber has it."""
    committed_s = shard.commit(keys, 0)
    held.wait_for(lambda held: held.versions[0].number == shard.number, DEADLINE_S)
    return time.monotonic() - committed_s


def main() -> None:
    """Measure in turns, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each turn (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write served_rows.json and served_rows.md")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.toml").write_text(JOB)
        store = open_store(str(Path(folder, "checkpoints")))
        store.create(plan_name(1), encode(PlanRecord.of(PLAN, source=None, coordinator_incarnation=1)))
        words = np.sort(mixed(np.arange(ROWS)))
        runs = [words[run] for run in cut_by_shard(words, SHARDS)]
        shards = [Shard(store, shard) for shard in range(SHARDS)]
        for shard, run in zip(shards, runs, strict=True):
            shard.commit(run, len(run))
        command = [sys.executable, "-u", "-m", "parashard", "serve", folder]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            addresses = [re.split(r"[ /]+", server.stdout.readline().strip()) for _ in range(2)]
            grpc_address, http_address = addresses[0][1], addresses[1][2]
            begin_s = time.monotonic()
            with ps.subscribe(grpc_address, timeout_s=DEADLINE_S) as held:
                whole_s = time.monotonic() - begin_s
                ways = {
                    "gRPC": over_grpc(grpc_address),
                    "HTTP/JSON": over_http(http_address),
                    "in a subscription": of_subscription(held),
                }
                rates: dict[str, list[float]] = {name: [] for name in ways}
                delays = []
                for turn in range(arguments.turns):
                    for name, look_up in ways.items():
                        rates[name].append(measure_look_ups(look_up, arguments.seconds, turn))
                    delays += [measure_delay(shards[0], runs[0][turn : turn + 1000], held) for _ in range(4)]
        finally:
            server.terminate()
            server.wait()
    sections = {
        f"Look-ups of {KEYS_AT_ONCE:,} keys, {ROWS:,} rows of {ELEMENTS} numbers, one client": table(
            ["way", "look-ups/s: median (least to most)"], [[name, spread(found)] for name, found in rates.items()]
        ),
        "From a commit of 1,000 rows until a subscriber has it": table(
            ["", "seconds: median (least to most)"],
            [["delay", spread(delays)], ["a first version, all rows", f"{whole_s:.2f}"]],
        ),
        "Load": load_before(load),
    }
    if arguments.write:
        figures = {"load": load, "look_ups_per_s": rates, "delay_s": delays, "first_version_s": whole_s}
        write("served_rows", sections, figures)
    for heading, text in sections.items():
        print(f"{heading}\n{text}\n")


if __name__ == "__main__":
    main()
