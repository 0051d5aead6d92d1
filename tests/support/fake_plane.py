"""A shard's data plane that is only a vector: pushes are added to it, and a test says what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from parashard.errors import ParashardError, ShapeMismatch, StaleIncarnation
from parashard.protocol.messages import PullRun, Push, PushResult, Receipt, Run, Target, Weights

TARGET = Target("run", "digest", 1, 0, 7)

_Result = TypeVar("_Result")


class FakePlane:
    """See `parashard_server.serving.session.Plane`. Not locked: tests make one request at a time where it matters.

    Attributes
    ----------
    weights : float32 array
        Zero at first.
    moved : list of (int, int)
        What a pull that knows a version is answered with: bytes [begin, end) of the vector.
    before_push, before_pull : callable
        Called first, so that a test can raise or wait.
    """

    def __init__(self, elements: int) -> None:
        self.weights = np.zeros(elements, "<f4")
        self.version = 0
        self.moved: list[tuple[int, int]] = []
        self.pushes: list[Push] = []
        self.runs: list[PullRun] = []
        self.before_push: Callable[[], object] = lambda: None
        self.before_pull: Callable[[], object] = lambda: None

    @property
    def push_bytes_max(self) -> int:
        return self.weights.nbytes

    def check(self, target: Target) -> None:
        if target != TARGET:
            raise StaleIncarnation(f"the request names incarnation {target.incarnation}; this is {TARGET.incarnation}")

    def push(self, push: Push, timeout_s: float) -> Receipt:
        self.before_push()
        self.check(push.target)
        self.pushes.append(push)
        gradient = np.frombuffer(push.payload.whole(), "<f4")
        self.weights[: gradient.size] += gradient
        self.version += 1
        return Receipt(PushResult.APPLIED, self.version, None)

    def pull(self, run: PullRun, timeout_s: float, read: Callable[[Weights], _Result]) -> _Result:
        self.before_pull()
        self.check(run.target)
        begin, end = run.offset_bytes, run.offset_bytes + run.length_bytes
        if end > self.weights.nbytes:
            raise ShapeMismatch(f"bytes [{begin}, {end}) are not within {self.weights.nbytes}")
        self.runs.append(run)
        moved = [(begin, end)] if run.known_version is None else self.moved
        cut = [(max(begin, first), min(end, last)) for first, last in moved]
        content = memoryview(self.weights).cast("B")
        return read(Weights(self.version, tuple(Run(a, content[a:b]) for a, b in cut if a < b)))


def refusing(error: ParashardError) -> Callable[[], object]:
    """Return what raises an error, once."""
    errors = [error]

    def refuse() -> None:
        if errors:
            raise errors.pop()

    return refuse
