"""Draining: a pause in leasing until every shard has applied the same steps, for a checkpoint of all of them.

Pure; `now_s` is an argument. One drain at a time serves all requests that arrive meanwhile. Knows steps and ids of
requests; the shell takes the checkpoint and reports the outcome. Every retry has a bound, with the reason in words.
Implements rule P8 of docs/protocol.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

ANSWERS_KEPT = 100
TAKING_S_MAX = 120.0  # how long a checkpoint of drained shards is retried, counted from the last change of a shard
READS_MAX = 5  # last checkpoints tried, each taken after the previous one was found damaged


class Answer(NamedTuple):
    """Outcome of a request: a checkpoint's id, or an error, or neither yet; and the checkpoint's number of steps."""

    checkpoint: str = ""
    error: str = ""
    steps: int = 0


class Draining:
    """Requests for drained checkpoints and their outcomes."""

    def __init__(self) -> None:
        self.target: int | None = None
        """The first step that is held back from leasing; None without a drain."""
        self.stops = False
        """The job stops once the checkpoint is stored."""
        self._waiting: set[int] = set()
        self._answers: OrderedDict[int, Answer] = OrderedDict()
        self._failing_since_s: float | None = None
        self._failing_view = 0

    def knows(self, request: int) -> bool:
        """Tell whether a request has been answered."""
        return request in self._answers

    def asked(self, request: int, target: int) -> Answer:
        """Process a request or its repetition; drain at `target` unless a drain is in progress."""
        if request in self._answers:
            return self._answers[request]
        self._waiting.add(request)
        if self.target is None:
            self.target = target
        return Answer(steps=self.target)

    def failed(self, error: str, view: int, now_s: float) -> Answer | None:
        """Record a failed attempt; return None to retry, or the final answer after TAKING_S_MAX."""
        # The time restarts when `view` changes, as with a shard's incarnation.
        if self._failing_since_s is None or view != self._failing_view:
            self._failing_since_s, self._failing_view = now_s, view
        if now_s - self._failing_since_s <= TAKING_S_MAX:
            return None
        return Answer(error=f"not every shard has saved within {TAKING_S_MAX:.0f} s: {error}", steps=self.target or 0)

    def ended(self, answer: Answer) -> None:
        """Answer all waiting requests, and resume leasing."""
        self._failing_since_s = None
        for request in self._waiting:
            self._answers[request] = answer
            if len(self._answers) > ANSWERS_KEPT:
                self._answers.popitem(last=False)
        self._waiting.clear()
        self.target, self.stops = None, False


class LastReads:
    """Failed attempts to read back a last checkpoint, each followed by a new checkpoint."""

    def __init__(self) -> None:
        self.damaged: dict[int, str] = {}
        """By shard, the folder of its part of the damaged checkpoint, which the shard must not return again."""
        self._failed = 0

    def failed(self, parts: Mapping[int, str], error: str) -> str:
        """Record the parts of a damaged checkpoint; return why no other one is tried, or "" to retry."""
        self.damaged = dict(parts)
        self._failed += 1
        if self._failed < READS_MAX:
            return ""
        return (
            f"the last checkpoint was taken {READS_MAX} times and never found as it was written: {error}; "
            "--resume goes on from what the shards have saved"
        )
