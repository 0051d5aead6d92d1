"""Certificates that a run's authority renews again and again while the whole job trains on hosts by ssh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster_run import ClusterRun, sets
from support.long_job import LongJob
from support.short_lives import ShortLives
from support.sshd import Sshd


def test_a_job_on_hosts_by_ssh_trains_while_every_certificate_is_renewed_and_connects_anew(
    sshd: Sshd, start_run: Callable[..., ClusterRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = LongJob(tmp_path, "ledger.toml", 300)
    lives = ShortLives(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(lives.pythonpath))

    def processes() -> dict[str, int]:
        found = {}
        for pid, words in sshd.processes().items():
            if "parashard_server" in words:
                found[f"shard-{words[words.index('--index') + 1]}"] = pid
            elif "parashard_worker" in words:
                found[words[words.index("--name") + 1]] = pid
        return found

    more = sets(job__epochs=1, cluster__transport="tcp", cluster__workers=2)
    with lives:
        lives.check(start_run(job.file, "--on", f"ssh:{sshd.hosts('one', 'two')}", *lives.words, *more), job, processes)
