"""Pods in the core: each end is an event and counts by role and reason; a wrong configuration ends the job."""

from __future__ import annotations

import pytest

from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.supervision import Pod, PodEnd
from support.coordinator_cases import core_of

WORKER = Pod("uid-0", "digits-worker-0-abcde", "worker", "Failed", 1)
SHARD = Pod("uid-1", "digits-shard-0", "shard", "Running")


def test_ends_are_events_and_count_by_role_and_reason() -> None:
    core = core_of()
    core.pod_ended(PodEnd(WORKER, "failed", 1))
    core.pod_ended(PodEnd(WORKER, "preempted", 75))
    core.pod_ended(PodEnd(SHARD, "failed", 1))
    core.pod_ended(PodEnd(WORKER, "failed", 1))
    assert core.job.supervision.pod_ends == {
        ("worker", "failed"): 2,
        ("worker", "preempted"): 1,
        ("shard", "failed"): 1,
    }
    assert "pod digits-worker-0-abcde failed, exit code 1" in core.job.events
    assert not core.job.over


@pytest.mark.parametrize("pod", [WORKER, SHARD])
def test_a_wrong_configuration_ends_the_job(pod: Pod) -> None:
    core = core_of()
    core.pod_ended(PodEnd(pod, "failed", 2))
    assert core.job.state is JobState.FAILED
    assert core.job.reason == f"pod {pod.name} failed, exit code 2"


def test_what_pods_do_after_the_end_is_of_no_interest() -> None:
    core = core_of()
    core.job.fail("enough")
    core.pod_ended(PodEnd(WORKER, "done", 0))
    assert not core.job.supervision.pod_ends


def test_what_became_of_scaling_is_an_event() -> None:
    core = core_of()
    core.job.add_event("the Job has 5 workers now")
    assert "the Job has 5 workers now" in core.job.events


def test_asking_for_the_same_number_of_workers_is_a_request_too() -> None:
    core = core_of()
    core.scale(4)
    core.scale(4)
    assert (core.job.workers_wanted, core.job.scale_requests) == (4, 2)
