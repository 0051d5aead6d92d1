"""Watched: a real training run and the Prometheus that scrapes it, for tests of what fires.

Rules run sixty times faster than they are (`minutes_become_seconds`); nothing else about them is changed. Owns neither
run nor Prometheus: `watch` does, for as long as a test looks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deploy.prometheus.targets import follow
from parashard.security.credentials import Credentials
from support.cluster_run import ClusterRun, eventually
from support.command_run import ROOT
from support.prometheus_server import PrometheusServer


class Watched:
    """A run, and the Prometheus that scrapes it."""

    def __init__(self, run: ClusterRun, prometheus: PrometheusServer) -> None:
        self.run = run
        self.prometheus = prometheus

    def evaluated(self, expr: str) -> list[dict[str, Any]]:
        """Return what a panel's expression has now."""
        asked = expr.replace("$__rate_interval", "4s").replace("$run", ".+")
        assert "$" not in asked
        return self.prometheus.query(asked)

    def expect_firing(self, *alerts: str) -> None:
        """Wait until all of these have fired, each at some moment."""
        missing = set(alerts)

        def look() -> bool:
            missing.difference_update(self.prometheus.firing())
            return not missing

        self.until(look, f"{alerts} fire")

    def expect_quiet(self, *alerts: str) -> None:
        """Wait until none of these fires."""
        self.until(lambda: not set(alerts) & self.prometheus.firing(), f"{alerts} do not fire")

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something is so; what did not come is told with the alerts' states."""
        eventually(condition, what, told=self.prometheus.told)

    def incarnation(self, shard: int) -> int:
        """Return a shard's incarnation, as it says itself; 0 while it does not answer."""
        found = self.prometheus.query(f'parashard_shard_incarnation{{shard="{shard}"}}')
        return max((int(series["value"][1]) for series in found), default=0)

    @contextmanager
    def stopped(self, module: str, label: str) -> Iterator[None]:
        """Stop a process, as a machine that hangs does, and let it go on afterwards."""
        self.run.kill(module, label, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in self.run.pids(module).values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@contextmanager
def watch(folder: Path, arguments: list[str], tls: Path | None = None) -> Iterator[Watched]:
    """Yield a run that trains and is scraped, with a TLS folder inside mutual TLS; both end with the block."""
    secured = ["--tls-dir", str(tls)] if tls else []
    run = ClusterRun(folder / "run", [*arguments, *secured], ROOT)
    run.credentials = Credentials(tls) if tls else None
    prometheus = None
    try:
        prometheus = PrometheusServer(folder)
        run.wait_for_steps(1)
        threading.Thread(target=follow, args=(run.dir, prometheus.targets, run.credentials), daemon=True).start()
        yield Watched(run, prometheus)
    finally:
        run.clean_up()
        if prometheus is not None:
            prometheus.stop()
