"""JobRun: the command line running a job in a process of its own, and the verdict on what came of it.

Owns the process, all that it started (found by the run directory in their command lines), and what counts as a broken
promise. Knows no fault. Called by `campaigns` and `failpoint_sweep`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from parashard.launch.local_cluster import MODULES
from support.report_oracle import evaluations_of, misreported

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.05
FAREWELL_S = 60.0  # for processes that have been asked to end and have not ended
FAULT_FREE_S = 300.0
ORACLES = ("ledger_wrong", "torn")


@dataclass(frozen=True)
class Ended:
    """How a run ended; the report is empty where there is none."""

    exit_code: int
    report: Mapping[str, Any]
    complaint: str
    left_over: Sequence[str]
    run_dir: Path | None = None  # whose files the report is compared with


class JobRun:
    """`parashard run` or `parashard chaos`, from its start to its end; leaving the context ends every process of it.

    Parameters
    ----------
    run_dir : Path
        The run's own directory, which does not exist yet; what goes to standard error is kept beside it.
    command : sequence of str
        "run" or "chaos", the job file and flags.
    environ : mapping, optional
        Added to the environment.
    """

    def __init__(self, run_dir: Path, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self.dir = run_dir
        words = [sys.executable, "-m", "parashard", *command, "--run-dir", str(run_dir), "--json"]
        self._out = run_dir.with_suffix(".out").open("w+")
        self._err = run_dir.with_suffix(".err").open("w+")
        self._process = subprocess.Popen(
            words,
            stdout=self._out,
            stderr=self._err,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, **(environ or {})},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._out.close()
        self._err.close()

    @property
    def over(self) -> bool:
        """The command has ended."""
        return self._process.poll() is not None

    def wait(self, deadline_s: float, meanwhile: Callable[[], None] = lambda: None) -> Ended:
        """Wait for the end, at most until the deadline (monotonic): a job must make progress, whatever befell it.

        `meanwhile` is called again and again until then.
        """
        while not self.over and time.monotonic() < deadline_s:
            meanwhile()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_S)
        if not self.over:
            return Ended(-1, {}, "the job has not ended within its time", ())
        lines = _content(self._out).splitlines()
        report = json.loads(lines[-1]) if lines else {}
        return Ended(self._process.returncode, report, _content(self._err).strip(), tuple(self._left_over()), self.dir)

    def lines(self, log: str, event: str) -> int:
        """Count the lines of a process's log that tell of an event."""
        try:
            return (self.dir / "logs" / f"{log}.log").read_text(errors="replace").count(f" event={event} ")
        except FileNotFoundError:
            return 0

    def signal(self, role: str, label: str, number: int) -> None:
        """Send a signal to a process of the run, if it is there."""
        for pid, words in self._pids().items():
            if words[3] == MODULES[role] and label in words:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _left_over(self) -> list[str]:
        """Return the command lines of the run's processes that are still there after a while."""
        deadline_s = time.monotonic() + FAREWELL_S
        while (left := self._pids()) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        return [" ".join(words) for words in left.values()]

    def _pids(self) -> dict[int, list[str]]:
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self._process.pid:
                with suppress(OSError):
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    if words[1:3] == ["-P", "-m"] and words[3] in MODULES.values() and str(self.dir) in " ".join(words):
                        found[int(entry.name)] = words
        return found


def violations(
    ended: Ended, expected_sha256: str = "", expected_evaluations: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the promises that a run broke, in words; empty if it kept all.

    Parameters
    ----------
    ended : Ended
        How the run ended.
    expected_sha256 : str
        Digest of the weights that a run without faults ends with; "": the job has none that is always the same.
    expected_evaluations : mapping, optional
        What a run without faults recorded of each evaluation, where that is always the same. One that is missing was
        told as missed.
    """
    report, found = ended.report, []
    if ended.exit_code != 0 or report.get("state") != "done":
        found.append(f"exit code {ended.exit_code}, state {report.get('state')}: {ended.complaint[-500:]}")
    found += [f"{name} is {report[name]}" for name in ORACLES if report.get(name)]
    if ended.run_dir is not None and report.get("state") == "done":
        found += misreported(ended.run_dir, report)
        recorded = evaluations_of(ended.run_dir)
        for step, metrics in (expected_evaluations or {}).items():
            if recorded.get(step, metrics) != metrics:
                found.append(f"after step {step} the metrics were {recorded[step]}, not {metrics}")
    if expected_sha256 and report.get("weights_sha256") != expected_sha256:
        found.append(f"weights are {report.get('weights_sha256')}, not {expected_sha256}")
    return found + [f"left over: {words}" for words in ended.left_over]


def fault_free(job: Sequence[str], policy: str, run_dir: Path) -> tuple[str, dict[str, Any]]:
    """Run a job without faults; return the digest of its weights, and its evaluations where rounds say of what."""
    with JobRun(run_dir, ["run", *job, "--consistency", policy]) as run:
        ended = run.wait(time.monotonic() + FAULT_FREE_S)
    assert not violations(ended), violations(ended)
    return str(ended.report["weights_sha256"]), evaluations_of(run_dir) if policy.startswith("sync") else {}


def sets(values: Mapping[str, Any]) -> list[str]:
    """Return the `--set` arguments for keys and values, of which a table is text in TOML."""
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def _content(file: Any) -> str:
    file.flush()
    file.seek(0)
    return str(file.read())
