"""Draining: a pause in leasing until every shard has applied the same steps, for a checkpoint of all of them (P8).

Pure. One drain at a time serves every request that comes meanwhile. Knows steps and ids of requests; the shell takes
the checkpoint and says what became of it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

ANSWERS_KEPT = 100


@dataclass(frozen=True)
class Answer:
    """What became of a request: a checkpoint's id, or an error, or neither yet; and the steps in question."""

    checkpoint: str = ""
    error: str = ""
    steps: int = 0


class Draining:
    """Requests for drained checkpoints and what became of them."""

    def __init__(self) -> None:
        self.target: int | None = None
        """The first step that is not leased meanwhile; None while nothing is drained."""
        self._waiting: set[int] = set()
        self._answers: OrderedDict[int, Answer] = OrderedDict()

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

    def ended(self, answer: Answer) -> None:
        """Answer everybody who waits, and lease on."""
        for request in self._waiting:
            self._answers[request] = answer
            if len(self._answers) > ANSWERS_KEPT:
                self._answers.popitem(last=False)
        self._waiting.clear()
        self.target = None
