"""A damaged file of rows: the run goes on from the chain of checkpoints before it, and each use counts once (P33)."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from parashard.checkpoints.catalogue import Catalogue, CheckpointId, by_age
from parashard.checkpoints.manifest import ShardManifest
from parashard.store import open_store
from parashard_server.state.rows.embedding_tables import CHAIN_MAX
from support.cluster_run import ClusterRun, sets
from support.command_run import DIES_WITH_US, ROOT
from support.long_job import LongJob

Start = Callable[..., ClusterRun]
QUICK = 1200  # steps of 2048
SAVED = CHAIN_MAX + 4


def manifests(run: ClusterRun, shard: int) -> list[ShardManifest]:
    """Return those of a shard's checkpoints, the oldest first."""
    catalogue = Catalogue(open_store(str(run.dir / "checkpoints")))
    return sorted(map(catalogue.manifest, catalogue.shard_checkpoints(1, shard)), key=by_age)


def base_of(manifest: ShardManifest) -> CheckpointId:
    """Return the checkpoint that its chain began with."""
    return min(CheckpointId(1, manifest.shard, file.incarnation, file.number) for file in manifest.table_files)


def test_a_run_goes_on_from_the_chain_before_a_damaged_file(start_run: Start, tmp_path: Path) -> None:  # P12, P33
    job = LongJob(tmp_path, "row_ledger.toml", QUICK)
    changed = sets(checkpoint__every_s=0, checkpoint__every_steps=8, checkpoint__keep=1, job__epochs=2)
    run = start_run(job.file, "--consistency", "sync:4", *changed)
    run.until(lambda status: all(shard.record.checkpoints > SAVED for shard in status.shards), "two chains are saved")
    run.process.kill()
    run.wait_until_all_exited()

    *_, newest = manifests(run, 0)
    base = base_of(newest)
    *_, before = [found for found in manifests(run, 0) if found.steps and base_of(found) != base]
    assert len(before.steps) < len(newest.steps)
    file = next(file for file in newest.table_files if (file.incarnation, file.number) == base[2:])
    path = run.dir / "checkpoints" / base.folder / file.name
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    whole = [*DIES_WITH_US, sys.executable, "-m", "parashard", "checkpoint", "verify", str(run.dir)]
    said = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 1
    assert f"shard 0 restarts from {CheckpointId.of(before)}, with {len(before.steps):,} of " in said.stdout

    job.let_end()
    again = start_run(job.file, "--consistency", "sync:4", *changed, "--resume", run_dir=run.dir)
    report = again.report()
    assert (report["state"], report["ledger_wrong"]) == ("done", 0)
    restored = re.findall(r'event=restored what="([^"]*)"', (run.dir / "logs" / "shard-0.log").read_text())
    assert restored[-1].startswith(f"restored {CheckpointId.of(before)} with "), restored
