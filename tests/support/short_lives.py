"""ShortLives: an authority whose certificates live for seconds, and a whole job that trains while all are renewed.

Only the launcher knows how long a certificate lives and when it is renewed, so only there the two are others.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.security.certs import issue, make_authority
from parashard.security.credentials import Credentials
from parashard.security.identity import OF_A_JOB, Identity
from support.cluster_run import ClusterRun, eventually, sets
from support.long_job import LongJob

LIFE_S = 10.0
RENEWALS = 3
"""A certificate is renewed at half its life: by the third renewal the first one has expired."""
LAUNCHER = f"""
from datetime import timedelta
from parashard.security import signing
signing.LIFE, signing.RENEWAL_LEAST_S = timedelta(seconds={LIFE_S}), 0.0
"""


class ShortLives:
    """An authority in a folder; within it the launcher's and the coordinator's own certificate is renewed, too."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.tls, self._authority, self._host = folder / "tls", folder / "ca", host
        self._over = threading.Event()
        self._renewing = threading.Thread(target=self._renew, daemon=True)
        make_authority(self._authority, valid_days=1)
        self._issue()
        self.words = ["--tls-dir", str(self.tls), *sets(cluster__authority=str(self._authority))]
        self.pythonpath = folder / "launcher"
        """For the launcher's PYTHONPATH."""
        self.pythonpath.mkdir()
        (self.pythonpath / "sitecustomize.py").write_text(LAUNCHER)

    def __enter__(self) -> ShortLives:
        self._renewing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._renewing.join()

    def check(self, run: ClusterRun, job: LongJob, processes: Callable[[], Mapping[str, int]]) -> None:
        """Check that a run of two shards and two workers goes on over renewals, and afterwards connects anew."""
        run.credentials = Credentials(self.tls)
        names = ["shard-0", "shard-1", "worker-0", "worker-1"]

        def until(condition: Callable[[], object], what: str) -> None:
            eventually(condition, what, told=run.told)

        def live(workers: int) -> bool:
            status = run.status()
            up = [one.live for one in (*status.workers, *status.shards)]
            return up == [True] * (workers + 2) and status.steps_complete > 0

        def renewals() -> int:
            logs = [run.dir / "logs" / f"{name}.log" for name in ("coordinator", *names)]
            return min(log.read_text().count("event=credentials-renewed") if log.exists() else 0 for log in logs)

        until((run.dir / "coordinator.json").exists, "the coordinator serves")
        until(lambda: live(2), "shards and workers are live")
        before = dict(processes())
        until(lambda: renewals() >= RENEWALS, "each process has had new certificates")
        assert (sorted(before), before) == (names, processes()), "none was started again"

        client = CoordinatorClient(find_coordinator(str(run.dir)), credentials=Credentials(self.tls))
        client.scale(3)  # an operator can ask, and the launcher hears it
        client.close()
        until(lambda: live(3), "a new worker connects to all")
        os.kill(before["shard-0"], signal.SIGKILL)
        until(lambda: live(3) and processes().get("shard-0", before["shard-0"]) != before["shard-0"], "it is back")
        steps = run.status().steps_complete
        until(lambda: run.status().steps_complete >= steps + 5, "each worker connects to the new shard")
        job.let_end()
        report = run.report()
        assert (report["ledger_wrong"], report["state"]) == (0, "done")
        assert [report[f"{role}_restarts"] for role in ("worker", "shard", "coordinator")] == [0, 1, 0]

    def _renew(self) -> None:
        while not self._over.wait(LIFE_S / 2):
            self._issue()

    def _issue(self) -> None:
        ends = datetime.now(UTC) + timedelta(seconds=LIFE_S)
        identities, begins = [Identity(role, "launcher") for role in OF_A_JOB], ends - timedelta(days=1)
        issue(self._authority, self.tls, identities, hosts=[self._host], valid_days=1, now=begins)
