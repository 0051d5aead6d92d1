"""A real Slurm, where its packages are installed and we are root; what a test leaves behind goes with it.

PARASHARD_SLURM=1 (`make test-slurm` sets it) asks for the tests that take minutes, too, and writes what they saw to
`benchmarks/results/slurm.md`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import REQUEUE_S, SlurmCluster, sweep, unavailable_reason
from slurm_job import SlurmJob

from benchmarks.machine import described
from support.long_job import LongJob

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "slurm.md"
EVENTS = 9  # that the tests of test_slurm_jobs.py tell of, one each
FOLDER = "parashard-slurm-"


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Return a Slurm of four nodes; skip the test where there can be none."""
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(f"NOTHING RUNS ON SLURM HERE: {reason}")
    sweep(FOLDER)
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))  # its path is short: sockets are in it
    cluster = SlurmCluster(folder)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def job(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Callable[..., SlurmJob]]:
    """Return a function that brings an example up on it; the job goes with the test, and nodes are idle then.

    It is not over before the test lets it end.
    """
    jobs: list[SlurmJob] = []

    def up(example: str, *sets: str, quick_until: int = 1, **partitions: str) -> SlurmJob:
        long = LongJob(tmp_path, example, quick_until)
        jobs.append(SlurmJob(slurm, tmp_path, long, *sets, **partitions))
        jobs[-1].script("up")
        return jobs[-1]

    yield up
    slurm.clear()


@pytest.fixture(scope="session")
def tell(slurm: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Return a function that notes what happened, after how many seconds all was as before, and the job's verdict.

    The notes are written once there is one of every test, and no test has failed.
    """
    rows: list[str] = []

    def note(event: str, back_s: float, verdict: str) -> None:
        rows.append(f"| {event} | {back_s:.0f} | {verdict} |")

    yield note
    if os.environ.get("PARASHARD_SLURM") == "1" and len(rows) == EVENTS and not request.session.testsfailed:
        machine, version = described(), slurm.run("sinfo", "--version").strip()
        RESULTS.write_text(
            f"`make test-slurm` on {machine['cpu']}, {machine['cores']} cores; date {machine['date']}, {version}.\n\n"
            "## Jobs on a real Slurm of four nodes\n\n"
            "| event | all processes back after, s | verdict |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n\n"
            f"Slurm starts no task within {REQUEUE_S} s after it was queued again, here; 120 s is its default.\n"
        )


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the jobs one at a time."""
    for item in items:
        if item.path.parent.name == "slurm":
            item.add_marker(pytest.mark.xdist_group("slurm"))
            item.add_marker(pytest.mark.timeout(1200))
