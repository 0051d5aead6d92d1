"""JobRun: a job under faults from its start to its end, and the verdict on what came of it.

Owns what counts as a broken promise. Knows no fault. Called by `campaigns` and `failpoint_sweep`.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from parashard.cli.chaos import PROMISES
from support.command_run import CommandRun
from support.report_oracle import evaluations_of, misreported

LOOK_S = 0.05
FAREWELL_S = 60.0  # for processes that have been asked to end and have not ended
FAULT_FREE_S = 1200.0


@dataclass(frozen=True)
class Ended:
    """How a run ended; the report is empty where there is none."""

    exit_code: int
    report: Mapping[str, Any]
    complaint: str
    left_over: Sequence[str]
    run_dir: Path | None = None  # whose files the report is compared with


class JobRun(CommandRun):
    """`parashard run` or `parashard chaos`, from its start to its end; leaving the context ends every process of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clean_up()

    @property
    def over(self) -> bool:
        """The command has ended."""
        return self.process.poll() is not None

    def wait(self, deadline_s: float, meanwhile: Callable[[], None] = lambda: None) -> Ended:
        """Wait for the end, at most until the deadline (monotonic): a job must make progress, whatever befell it.

        `meanwhile` is called again and again until then.
        """
        while not self.over and time.monotonic() < deadline_s:
            meanwhile()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LOOK_S)
        if not self.over:
            return Ended(-1, {}, "the job has not ended within its time", ())
        lines = self.output().splitlines()
        report = json.loads(lines[-1]) if lines else {}
        return Ended(self.process.returncode, report, self.complaint().strip(), tuple(self._lingering()), self.dir)

    def lines(self, log: str, event: str) -> int:
        """Count the lines of a process's log that tell of an event."""
        try:
            return (self.dir / "logs" / f"{log}.log").read_text(errors="replace").count(f" event={event} ")
        except FileNotFoundError:
            return 0

    def signal(self, role: str, label: str, number: int) -> None:
        """Send a signal to a process of the run, if it is there."""
        pid = self.pids(role).get(label)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _lingering(self) -> list[str]:
        """Return the command lines of the run's processes that are still there after a while."""
        deadline_s = time.monotonic() + FAREWELL_S
        while (left := self.left_over()) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        return [" ".join(words) for words in left]


class Expected(NamedTuple):
    """What a run without faults ends with, where that is always the same."""

    sha256: str = ""  # digest of the weights
    # What was recorded of each evaluation, by step; empty where rounds do not say of what.
    evaluations: Mapping[int, Any] = MappingProxyType({})
    rows: Mapping[str, str] = MappingProxyType({})  # digest of each table's rows, likewise


NOTHING_EXPECTED = Expected()


def violations(ended: Ended, expected: Expected = NOTHING_EXPECTED) -> list[str]:
    """Return the promises that a run broke, in words; empty if it kept all.

    Parameters
    ----------
    ended : Ended
        How the run ended.
    expected : Expected
        An evaluation of it that the run lacks was told as missed.
    """
    report, found = ended.report, []
    if ended.exit_code != 0 or report.get("state") != "done":
        found.append(f"exit code {ended.exit_code}, state {report.get('state')}: {ended.complaint[-500:]}")
    found += [f"{name} is {report[name]}" for name in PROMISES if report.get(name)]
    if ended.run_dir is not None and report.get("state") == "done":
        found += misreported(ended.run_dir, report)
        recorded = evaluations_of(ended.run_dir)
        for step, metrics in expected.evaluations.items():
            if recorded.get(step, metrics) != metrics:
                found.append(f"after step {step} the metrics were {recorded[step]}, not {metrics}")
    if expected.sha256 and report.get("weights_sha256") != expected.sha256:
        found.append(f"weights are {report.get('weights_sha256')}, not {expected.sha256}")
    if expected.rows and report.get("rows_digest") != expected.rows:
        found.append(f"rows of tables are {report.get('rows_digest')}, not {expected.rows}")
    return found + [f"left over: {words}" for words in ended.left_over]


def fault_free(job: Sequence[str], policy: str, run_dir: Path) -> Expected:
    """Run a job without faults, and return what it ended with."""
    with JobRun(run_dir, ["run", *job, "--consistency", policy]) as run:
        ended = run.wait(time.monotonic() + FAULT_FREE_S)
    assert not violations(ended), violations(ended)
    if not policy.startswith("sync"):
        return Expected(str(ended.report["weights_sha256"]))
    return Expected(str(ended.report["weights_sha256"]), evaluations_of(run_dir), ended.report.get("rows_digest") or {})


def sets(values: Mapping[str, Any]) -> list[str]:
    """Return the `--set` arguments for keys and values, of which a table is text in TOML."""
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
