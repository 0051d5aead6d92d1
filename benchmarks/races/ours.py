"""Our contestant: a coordinator and a shard as the product starts them, and this process as the worker.

The worker pushes and pulls with the product's `ShardClient`, each push as a step of its own, so that all that makes a
push exactly-once is at work: run, incarnation and applied set. It holds no lease: leases pace steps and decide
nothing. Started by `benchmarks.races.contestants`, in the environment that a worker has.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.peers import seam
from benchmarks.races.ballast import COLUMNS
from parashard.client.proto_conversion import plan_from, view_from
from parashard.client.pulled import Pulled
from parashard.client.pulled_rows import TableSet
from parashard.client.shard_client import ShardClient
from parashard.job.embeddings import tables_of
from parashard.job.layers import parse_set
from parashard.job.load import as_toml, load_job
from parashard.launch.local_cluster import MODULES, LocalCluster
from parashard.process.resources import EVERY_STEP, keep_freed_memory
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.security.given_credentials import credentials_in
from parashard.transports.choosing import connect_by

JOB = Path(__file__).parent / "ballast.toml"
STEPS = 1_000_000_000  # more than any race pushes


class Cluster:
    """A coordinator and one shard, of one job.

    Parameters
    ----------
    folder : Path
        For the run's files.
    settings : sequence of str
        KEY=VALUE, over those of `ballast.toml`.
    tls_dir : Path, optional
        Credentials of all processes.
    """

    def __init__(self, folder: Path, settings: list[str], tls_dir: Path | None = None) -> None:
        job = load_job(JOB, [parse_set(setting) for setting in settings], {}).job
        file = folder / "job.toml"
        file.write_text(as_toml(job))
        self._cluster = LocalCluster(folder)
        model = ["--model-folder", str(JOB.parent)]
        tls = [] if tls_dir is None else ["--tls-dir", str(tls_dir)]
        credentials = credentials_in(tls_dir)
        self._cluster.start(
            "coordinator", MODULES["coordinator"], ["--job", str(file), "--run-dir", str(folder), *model, *tls]
        )
        self._cluster.start("shard-0", MODULES["shard"], ["--connect", str(folder), "--index", "0", *tls])
        self._coordinator = CoordinatorClient(find_coordinator(str(folder)), where=str(folder), credentials=credentials)
        reply = self._coordinator.get_job()
        plan, connect = plan_from(reply.plan), connect_by(job.cluster.transport, credentials)
        tables = TableSet(tables_of(job), job.job.seed)
        self.client = ShardClient(reply.run_id, reply.job_digest, plan, "worker-0", connect=connect, tables=tables)
        self.client.use(view_from(self._coordinator.retry(lambda: self._coordinator.get_view(reply.run_id))))

    def end(self) -> None:
        """End the processes."""
        self.client.close()
        self._coordinator.close()
        self._cluster.end()


class OurPushPull(seam.PushPull):
    """The worker; every size has a cluster of its own.

    Parameters
    ----------
    settings : sequence of str
        KEY=VALUE, such as those that name the transport.
    tls_dir : Path, optional
        Credentials of all its processes; without, nothing is encrypted.
    """

    def __init__(self, settings: list[str], tls_dir: Path | None = None) -> None:
        self._tls_dir = tls_dir
        self._settings = settings
        self._cluster: Cluster | None = None

    def open(self, gradient: seam.Floats) -> None:
        """Start processes with weights of zeros, and end those before."""
        self.close()
        self._folder = tempfile.TemporaryDirectory()
        own = [
            f"model.elements={gradient.size}",
            f"data.examples={STEPS}",
            f"optimizer.learning_rate={seam.LEARNING_RATE}",
            'cluster.launcher="external"',
        ]
        self._cluster = Cluster(Path(self._folder.name), [*own, *self._settings], self._tls_dir)
        self._gradients = {"ballast": gradient.reshape(-1, COLUMNS)}
        self._steps = itertools.count()
        self._pulled: Pulled | None = None

    def push(self) -> None:
        """Push the gradient as the next step, and release the weights that were pulled before, as a worker does."""
        assert self._cluster is not None
        self._cluster.client.push(next(self._steps), self._gradients, self._pulled)
        if self._pulled is not None:
            self._pulled.release()

    def pull(self) -> seam.Floats:
        """Pull the weights."""
        assert self._cluster is not None
        self._pulled = self._cluster.client.pull()
        return self._pulled.variables["ballast"].ravel()

    def timed(self, repeats: int) -> tuple[dict[str, list[float]], int]:
        """Return milliseconds as all contestants do, and also those of a turn of a worker's loop."""
        times, pushes = super().timed(repeats)
        return {**times, "loop_ms": self._looped(repeats)}, pushes + repeats

    def _looped(self, repeats: int) -> list[float]:
        """Return the milliseconds of each turn of a loop that pulls the next weights while a push is under way.

        A worker with `cluster.pipeline_depth = 1` does the same, and computes a gradient besides.
        """
        assert self._cluster is not None
        client = self._cluster.client
        with ThreadPoolExecutor(1) as pulls:
            pulled = client.pull()

            def turn() -> None:
                nonlocal pulled
                pulling = pulls.submit(client.pull)
                client.push(next(self._steps), self._gradients, pulled)
                pulled.release()
                pulled = pulling.result()

            times_ms = [seam.milliseconds(turn) for _ in range(repeats)]
        pulled.release()
        return times_ms

    def close(self) -> None:
        """End the processes, if there are any."""
        if self._cluster is not None:
            self._cluster.end()
            self._cluster = None
            self._folder.cleanup()


def main() -> None:
    """Answer rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    keep_freed_memory(EVERY_STEP)  # as a worker does
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the job")
    contestant = OurPushPull(parser.parse_args().set)
    try:
        seam.serve(seam.push_pull_answers(contestant), ["parashard", "grpcio", "numpy"])
    finally:
        contestant.close()


if __name__ == "__main__":
    main()
