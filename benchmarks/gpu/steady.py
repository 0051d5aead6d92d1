"""Steady: a callback that measures a run once it is warm, ends it after some seconds, and may have it profiled.

A run is warm when its first epoch is over and every worker has taken some steps: initial loading and compiling do not
count. A worker's time by phase is the difference between its status then and at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

import parashard as ps
from parashard._proto import coordinator_pb2 as pb
from parashard.errors import ParashardError
from parashard.launch.programs import processes_of
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator, run_id_in

WARM_STEPS = 10  # of each worker
PROFILE_S, SAMPLES_PER_S = 4, 200
PROFILE_END_S = 20.0  # for py-spy to write its samples


class Moment(NamedTuple):
    """The end of an epoch."""

    at_s: float  # when
    steps: int  # steps of all workers so far
    phases_s: Counter[str]  # time of their loops by phase


class Steady(ps.callbacks.Callback):
    """Measures a run whose epoch has this many examples.

    Parameters
    ----------
    examples : int
        Examples of an epoch.
    workers : int
        Number of workers; 0: this process trains.
    seconds : float
        How long to measure, at least.
    profile : str
        Prefix of the names of files for py-spy's stacks; empty: no profile.
    """

    def __init__(self, examples: int, workers: int, seconds: float, profile: str = "") -> None:
        self._examples, self._workers, self._seconds, self._profile = examples, workers, seconds, profile
        self._moments: list[Moment] = []
        self._profilers: list[subprocess.Popen[bytes]] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        """Record the time, and end the training after enough of it."""
        now_s, found = time.perf_counter(), self._status()
        if not self._moments and not self._is_warm(found):
            return
        spent: Counter[str] = Counter()
        for worker in found:
            spent.update({phase.name: seconds for phase, seconds in worker.phases.ListFields()})
        self._moments.append(Moment(now_s, sum(worker.steps_complete for worker in found), spent))
        if len(self._moments) == 1 and self._profile:
            self._begin_profile()
        sampled = all(profiler.poll() is not None for profiler in self._profilers)
        if now_s - self._moments[0].at_s >= self._seconds and sampled:
            self.model.stop_training = True

    def figures(self) -> dict[str, Any]:
        """Return the speed, and milliseconds of a worker's step by phase; RuntimeError where nothing was measured."""
        for profiler in self._profilers:
            with suppress(subprocess.TimeoutExpired):
                profiler.wait(PROFILE_END_S)
        if len(self._moments) < 2:
            raise RuntimeError("the run was over before it was measured")
        first, last = self._moments[0], self._moments[-1]
        examples, steps = self._examples * (len(self._moments) - 1), last.steps - first.steps
        spent = last.phases_s - first.phases_s
        return {
            "examples_per_s": examples / (last.at_s - first.at_s),
            "measured_s": last.at_s - first.at_s,
            "phases_ms": {phase: 1e3 * seconds / steps for phase, seconds in spent.items()} if steps else {},
        }

    def _status(self) -> list[pb.WorkerStatus]:
        if not self._workers:
            return []
        where = str(self.model.run_dir)
        with suppress(ParashardError):
            client = CoordinatorClient(find_coordinator(where, wait_s=0.0))
            try:
                return list(client.get_status(run_id_in(where)).workers)
            finally:
                client.close()
        return []

    def _is_warm(self, found: list[pb.WorkerStatus]) -> bool:
        return sum(worker.steps_complete >= WARM_STEPS for worker in found) >= self._workers

    def _begin_profile(self) -> None:
        program = shutil.which("py-spy")
        if program is None:
            print("no profile: py-spy is not installed", file=sys.stderr)
            return
        processes = processes_of(self.model.run_dir) if self._workers else {"fit": os.getpid()}
        for name in ("fit", "worker-0", "shard-0"):
            if name in processes:
                words = ["record", "--threads", "--idle", "--nonblocking", "--format", "raw", "--pid"]
                words += [str(processes[name]), "--duration", str(PROFILE_S), "--rate", str(SAMPLES_PER_S)]
                words += ["--output", f"{self._profile}.{name}.raw"]
                self._profilers.append(subprocess.Popen([program, *words], stdout=subprocess.DEVNULL))
