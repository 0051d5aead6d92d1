"""LocalLeasing: the leases of the only worker of a run, by calls of the coordinator in the thread that computes.

Ctrl-C and SIGTERM are here, too: the step in the works is finished, then the training stops.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, Self

from parashard._proto import coordinator_pb2 as pb
from parashard_coordinator.core.calls import (
    CompletedStep,
    EvaluationResult,
    FailedStep,
    FailureKind,
    LeaseAnswer,
    LeaseCall,
)
from parashard_coordinator.endpoints.service import completed_step, evaluation_grants, evaluation_result
from parashard_worker.leased import Work
from parashard_worker.leasing import Leasing

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether a stop was asked for; the second signal breaks a computing model off, by KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        self.in_users_code = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Take the signals until the end of the block; in another thread than the main one there are none to take."""
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN and handler is not None:
                self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.asked and self.in_users_code:
            raise KeyboardInterrupt
        self.asked = True


class LocalCoordinator(NamedTuple):
    """The coordinator of a run in this process, as functions."""

    lease: Callable[[LeaseCall], LeaseAnswer]
    follow: Callable[[], bool]  # have callbacks handle what has happened; returns whether they have
    look: Callable[[], None]  # show progress and take checkpoints, between two calls
    over: Callable[[], bool]
    wants_steps: bool  # callbacks hear of each step before the next one has its learning rate


class LocalLeasing(Leasing):
    """Leases of the steps of one round after the other: no thread, no message and no lease time."""

    view = 0  # the shard stays where it is
    depth = 0  # nothing overlaps in one thread

    def __init__(
        self,
        coordinator: LocalCoordinator,
        worker: str,
        incarnation: int,
        round_steps: int,
        stop: Interruption,
        *,
        reads_on: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self._coordinator = coordinator
        self._call = LeaseCall(worker, incarnation, 0)
        self._round_steps = round_steps
        self._reads_on = reads_on  # whether the examples of the step after one may be read while it is computed
        self._stop = stop
        self._queue: deque[Work] = deque()
        self._completed: list[CompletedStep] = []
        self._failed: list[FailedStep] = []
        self._evaluated: list[EvaluationResult] = []
        self.error: BaseException | None = None  # what the model raised last

    @property
    def over(self) -> bool:
        """There will be no more work."""
        return self._coordinator.over()

    def expected(self, step: int) -> int | None:
        """Return the step after one: it comes next unless one fails, or the training ends early."""
        return step + 1 if self._reads_on(step) else None

    def take(self, timeout_s: float) -> Work | None:
        """Return the next piece of work; first report and ask if none is left of the round."""
        if not self._queue:
            self._ask()
        return self._queue.popleft() if self._queue else None

    def _ask(self) -> None:
        coordinator, handled = self._coordinator, False
        if self._call.sequence:
            coordinator.look()
            if coordinator.over():
                return
        if coordinator.wants_steps:
            self.report()
            handled = coordinator.follow()
        answer = self._lease(self._round_steps)
        handled = coordinator.follow() or handled
        if answer.evaluations:  # steps are granted again once it is known what the weights are worth
            self._queue.extend(evaluation_grants(answer))
        elif answer.granted:
            self._queue.extend(answer.granted)  # type: ignore[arg-type]  # as the message, which it has no need of
        elif not handled and not coordinator.over():
            time.sleep(answer.retry_after_s)  # a step failed, and is due again after a pause

    def report(self) -> None:
        """Report what was done, and ask for nothing."""
        self._lease(0)

    def _lease(self, want: int) -> LeaseAnswer:
        call = self._call._replace(
            sequence=self._call.sequence + 1,
            want=want,
            completed=self._completed,
            failed=self._failed,
            evaluated=self._evaluated,
        )
        answer = self._coordinator.lease(call)
        self._call = call
        self._completed, self._failed, self._evaluated = [], [], []
        return answer

    @contextmanager
    def computing(self, work: Work) -> Iterator[None]:
        """Note that the model computes, and what it raises."""
        self._stop.in_users_code = True
        try:
            yield
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._stop.in_users_code = False

    reading = computing

    def announce(self, step: int) -> bool:
        """Tell nobody: the death of this process ends the run."""
        return True

    def completed(self, step: pb.CompletedStep) -> None:
        """Report a step that the shard has."""
        self._completed.append(completed_step(step))

    def failed(self, step: int, reason: str, kind: pb.FailureKind = pb.FAILURE_KIND_UNSPECIFIED) -> None:
        """Report a step that failed; the rest of its round is granted again."""
        self._raise_interrupt()
        self._failed.append(FailedStep(step, reason, FailureKind(kind)))
        self._queue.clear()

    def dropped(self, step: int, *, queue_too: bool = False) -> None:
        """Give a step back, with the rest of its round."""
        self._queue.clear()

    def evaluated(self, result: pb.EvaluationResult) -> None:
        """Report the outcome of an evaluation."""
        self._raise_interrupt()
        self._evaluated.append(evaluation_result(result))

    def _raise_interrupt(self) -> None:
        """Raise a second Ctrl-C, which is no error of the model."""
        if isinstance(self.error, KeyboardInterrupt):
            raise self.error
