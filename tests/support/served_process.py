"""`parashard serve` in a process of its own, and a witness of what its subscriber holds of a ledger of rows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from parashard.api.subscription import Subscription
from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.row_files import iterate_rows
from parashard.plan.embedding import cut_by_shard, mixed, unmixed
from parashard.store import open_store
from support.cluster_run import DEADLINE_S, ClusterRun, eventually
from support.command_run import DIES_WITH_US, ROOT

EXAMPLES, SHARED = 1024, 7
KEYS = np.sort(mixed(np.concatenate([np.arange(EXAMPLES), (1 << 62) + np.arange(SHARED), [-1]])))
"""Mixed, all that can have a row, and one that never has."""


class Server:
    """`parashard serve` in a process of its own, one after another at the ports that the first one found."""

    def __init__(self, place: str, out: Path, *arguments: str) -> None:
        self._place, self._out, self._arguments = place, out, arguments
        self.process: subprocess.Popen[bytes] | None = None
        self.ports = [0, 0]

    def start(self) -> str:
        """Start it and return its address once it listens."""
        words = ["serve", self._place, "--port", str(self.ports[0]), "--http-port", str(self.ports[1])]
        with self._out.open("wb") as out:
            command = [*DIES_WITH_US, sys.executable, "-m", "parashard", *words, *self._arguments]
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )
        said = eventually(lambda: re.search(r"gRPC \S+:(\d+)\nHTTP \S+:(\d+)/", self._out.read_text()), "it listens")
        self.ports = [int(port) for port in said.groups()]
        return f"127.0.0.1:{self.ports[0]}"

    def said(self) -> str:
        """Return what it has written."""
        return self._out.read_text()

    def end(self, number: int = signal.SIGKILL) -> int:
        """End it and return its exit code."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.send_signal(number)
        return process.wait(DEADLINE_S)


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
