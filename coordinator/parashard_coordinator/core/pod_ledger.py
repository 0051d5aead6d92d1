"""PodLedger: which pods ended, and whether they were preempted, stopped, or failed. Each end is reported once.

Pure: takes pods as the API returns them, and returns ends. A list has all pods, an event one change, and both may
repeat known ones. Knows no HTTP and no clock; called by `parashard_coordinator.kubernetes.watching`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

STOPPED_EXIT_CODES = (0, 75, 143)
"""Exit codes of a stopped container: a handled SIGTERM, or SIGTERM before its handler was installed."""

ROLES = ("shard", "worker")

REASONS = ("done", "failed", "preempted", "stopped", "unseen")
"""Why a pod ended.

done: its work was done. failed: it ended with an error. preempted: by Kubernetes (condition DisruptionTarget).
stopped: on request, such as scaling down. unseen: it is gone, and its end was not observed.
"""


class Pod(NamedTuple):
    """A pod, as the API returned it."""

    uid: str
    name: str  # which a replacement may have again
    role: str  # "shard" or "worker"
    phase: str  # Pending, Running, Succeeded or Failed
    exit_code: int | None = None  # of its container, once that has ended and is not restarted
    restarts: int = 0  # how often its container was restarted in place, the last time after `last_exit_code`
    last_exit_code: int | None = None
    disruption: str = ""  # reason of the condition DisruptionTarget, such as PreemptionByScheduler; empty: none

    @property
    def over(self) -> bool:
        """Whether it will not run again."""
        return self.phase in ("Succeeded", "Failed")


class PodEnd(NamedTuple):
    """The end of a pod, or of a container that is restarted in place."""

    pod: Pod
    reason: str
    exit_code: int | None

    def __str__(self) -> str:
        code = "" if self.exit_code is None else f", exit code {self.exit_code}"
        why = f" ({self.pod.disruption})" if self.pod.disruption else ""
        return f"pod {self.pod.name} {self.reason}{why}{code}"


class PodLedger:
    """The known pods of one job, by uid."""

    def __init__(self) -> None:
        self._known: dict[str, Pod] = {}
        self._ended: set[str] = set()
        self._listed = False

    def listed(self, pods: Iterable[Pod]) -> list[PodEnd]:
        """Take a list of all pods; return the ends since the last one. The first list is the initial state."""
        now = {pod.uid: pod for pod in pods}
        if not self._listed:
            self._listed = True
            self._known = now
            self._ended = {pod.uid for pod in now.values() if pod.over}
            return []
        ends = [end for uid, pod in list(self._known.items()) if uid not in now for end in self.deleted(pod)]
        for pod in now.values():
            ends += self.changed(pod)
        return ends

    def changed(self, pod: Pod) -> list[PodEnd]:
        """Take a new or changed pod; return the ends."""
        before = self._known.get(pod.uid)
        self._known[pod.uid] = pod
        ends = []
        if pod.restarts > (before.restarts if before else 0):
            ends.append(PodEnd(pod, _reason(pod, pod.last_exit_code), pod.last_exit_code))
        if pod.over and pod.uid not in self._ended:
            self._ended.add(pod.uid)
            done = pod.phase == "Succeeded" and not pod.disruption
            ends.append(PodEnd(pod, "done" if done else _reason(pod, pod.exit_code), pod.exit_code))
        return ends

    def deleted(self, pod: Pod) -> list[PodEnd]:
        """Take a deleted pod in its last state; return the ends."""
        ends = self.changed(pod)
        del self._known[pod.uid]
        if pod.uid not in self._ended:
            ends.append(PodEnd(pod, "preempted" if pod.disruption else "unseen", None))
        self._ended.discard(pod.uid)
        return ends


def _reason(pod: Pod, exit_code: int | None) -> str:
    if pod.disruption:
        return "preempted"
    if exit_code is None:
        return "unseen"
    return "stopped" if exit_code in STOPPED_EXIT_CODES else "failed"
