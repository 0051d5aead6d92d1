"""LocalLeasing: leases of a run's only worker, by direct calls of the coordinator in the computing thread.

Also handles Ctrl-C and SIGTERM: the current step is finished, then the training stops.
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
    """Whether a stop was requested; a second signal interrupts a computing model by KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        self.in_users_code = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Handle the signals until the end of the block; only the main thread can."""
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
    follow: Callable[[], bool]  # pass events to callbacks; returns whether they handled a milestone
    look: Callable[[], None]  # show progress and take checkpoints
    over: Callable[[], bool]
    wants_steps: bool  # callbacks must handle each step before the next one is granted with its learning rate


class LocalLeasing(Leasing):
    """Leases of the steps of one round after the other, without thread, message and lease time.

    Of `Leasing` only the names that a session calls are here: its thread, clock and `LeasedWork` are not made.
    """

    view = 0  # the shard never moves
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
        self._reads_on = reads_on  # whether to prefetch the next step's examples while a step is computed
        self._stop = stop
        self._queue: deque[Work] = deque()
        self._completed: list[CompletedStep] = []
        self._failed: list[FailedStep] = []
        self._evaluated: list[EvaluationResult] = []
        self.error: BaseException | None = None  # the model's last error

    @property
    def over(self) -> bool:
        """Whether there will be no more work."""
        return self._coordinator.over()

    def expected(self, step: int) -> int | None:
        """Return the step to prefetch: the next one, unless a step fails or the training ends early."""
        return step + 1 if self._reads_on(step) else None

    def take(self, timeout_s: float) -> Work | None:
        """Return the next piece of work; if the round has none left, report and ask for more first."""
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
        if answer.evaluations:  # steps are granted again after the evaluation
            self._queue.extend(evaluation_grants(answer))
        elif answer.granted:
            self._queue.extend(answer.granted)  # type: ignore[arg-type]  # has the message's fields
        elif not handled and not coordinator.over():
            time.sleep(answer.retry_after_s)  # a step failed; it is granted again after a pause

    def report(self) -> None:
        """Report results without asking for work."""
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
        """Mark the model as computing, and keep its error."""
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
        """Do nothing: the death of this process ends the run."""
        return True

    def completed(self, step: pb.CompletedStep) -> None:
        """Report a step that the shard has applied."""
        self._completed.append(completed_step(step))

    def failed(self, step: int, reason: str, kind: pb.FailureKind = pb.FAILURE_KIND_UNSPECIFIED) -> None:
        """Report a step that failed; the rest of its round is granted again."""
        self._raise_interrupt()
        self._failed.append(FailedStep(step, reason, FailureKind(kind)))
        self._queue.clear()

    def dropped(self, step: int, *, queue_too: bool = False) -> None:
        """Return a step, with the rest of its round."""
        self._queue.clear()

    def evaluated(self, result: pb.EvaluationResult) -> None:
        """Report the outcome of an evaluation."""
        self._raise_interrupt()
        self._evaluated.append(evaluation_result(result))

    def _raise_interrupt(self) -> None:
        """Re-raise a second Ctrl-C, which is not an error of the model."""
        if isinstance(self.error, KeyboardInterrupt):
            raise self.error
