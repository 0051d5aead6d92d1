"""Draining: a pause in leasing until every shard has applied the same steps, for a checkpoint of all of them.

Pure; `now_s` is an argument. One drain at a time serves every request that comes meanwhile. Knows steps and ids of
requests; the shell takes the checkpoint and says what became of it. Every repetition has a bound, with the reason in
words. Implements rule P8 of docs/protocol.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

ANSWERS_KEPT = 100
TAKING_S_MAX = 120.0  # for which a checkpoint of shards that have all steps is tried, while none is restarted
READS_MAX = 5  # of last checkpoints, each taken after the one before it was found damaged


class Answer(NamedTuple):
    """What became of a request: a checkpoint's id, or an error, or neither yet; and the steps in question."""

    checkpoint: str = ""
    error: str = ""
    steps: int = 0


class Draining:
    """Requests for drained checkpoints and what became of them."""

    def __init__(self) -> None:
        self.target: int | None = None
        """The first step that is not leased meanwhile; None while nothing is drained."""
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
        """Take a request, or the repeat of one; drain at `target` unless a drain is under way."""
        if request in self._answers:
            return self._answers[request]
        self._waiting.add(request)
        if self.target is None:
            self.target = target
        return Answer(steps=self.target)

    def failed(self, error: str, view: int, now_s: float) -> Answer | None:
        """Take note of a try that may be repeated; return the answer instead where that has gone on for too long."""
        # `view` changes with a shard's incarnation: the time begins again then.
        if self._failing_since_s is None or view != self._failing_view:
            self._failing_since_s, self._failing_view = now_s, view
        if now_s - self._failing_since_s <= TAKING_S_MAX:
            return None
        return Answer(error=f"not every shard has saved within {TAKING_S_MAX:.0f} s: {error}", steps=self.target or 0)

    def ended(self, answer: Answer) -> None:
        """Answer all requests that wait, and resume leasing."""
        self._failing_since_s = None
        for request in self._waiting:
            self._answers[request] = answer
            if len(self._answers) > ANSWERS_KEPT:
                self._answers.popitem(last=False)
        self._waiting.clear()
        self.target, self.stops = None, False


class LastReads:
    """Attempts to read the last checkpoint back, each of another one."""

    def __init__(self) -> None:
        self.damaged: dict[int, str] = {}
        """By shard the folder of its part in the one that was damaged: the shard hands it out no more."""
        self._failed = 0

    def failed(self, parts: Mapping[int, str], error: str) -> str:
        """Take note of a checkpoint that is damaged, by its parts; return why no other one is tried, or ""."""
        self.damaged = dict(parts)
        self._failed += 1
        if self._failed < READS_MAX:
            return ""
        return (
            f"the last checkpoint was taken {READS_MAX} times and never found as it was written: {error}; "
            "--resume goes on from what the shards have saved"
        )
