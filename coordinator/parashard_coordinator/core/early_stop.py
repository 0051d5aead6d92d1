"""Ends before the last step: what is leased is finished, and nothing more is leased (P8).

Pure. Called where that is decided: by a target, by callbacks, by a schedule that is closed.
"""

from __future__ import annotations

from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.job_record import JobRecord


def stop_at_frontier(job: JobRecord, why: str) -> None:
    """Lease no new step; the job ends with what is leased (P8). Nothing, if it ends anyway."""
    if job.state is JobState.RUNNING and not job.leases.finished:
        job.leases.stop_at_frontier()
        _stop_early(job, why)


def open_steps(job: JobRecord, steps: int, *, closed: bool) -> None:
    """Open the steps below `steps`, in a job of open length; once it is closed, the job ends when they are in."""
    if job.scheduled is None or job.over:
        return
    job.scheduled = max(job.scheduled, steps)
    if closed and not job.early_stop and job.state is JobState.RUNNING:
        job.leases.stop_at(max(job.scheduled, job.leases.leased_so_far()))
        _stop_early(job, "the schedule is closed")


def _stop_early(job: JobRecord, why: str) -> None:
    """End the job at the steps below the leases' lowered target."""
    target = job.leases.target
    job.evaluations.stop_at(target)
    job.early_stop = why
    job.decisions += 1
    of_all = "" if job.scheduled is not None else f" of {job.options.steps_total:,}"
    job.change_state(JobState.DRAINING, f"{why}; finishing {target:,}{of_all} steps")
