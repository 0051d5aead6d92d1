"""Control a run from another thread of a program (RunControl), and follow it for callbacks (RunFollower)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from parashard._proto import coordinator_pb2 as pb
from parashard.plan.intervals import IntervalSet

if TYPE_CHECKING:
    from parashard.callbacks.running import Callbacks

Follow = Callable[[pb.FollowRequest], pb.FollowReply]
"""Asks the coordinator, once; the run's id is filled in."""
EAGER_S = 0.01  # between two polls of the job while the program may be waiting for a step


class RunControl:
    """Scheduled and complete steps of a job, and the request to stop.

    With `open_length` only scheduled steps are leased, and the job ends once the schedule is closed and they are
    complete. `on_report` is called in the run's thread with the complete steps, after each report of the coordinator.
    """

    def __init__(self, *, open_length: bool = False, on_report: Callable[[IntervalSet], None] | None = None) -> None:
        self.open_length = open_length
        self._on_report = on_report
        self._wake = threading.Event()
        self._changed = threading.Condition()
        self.scheduled = 0
        self.closed = False
        self.stopping = False
        self.complete = IntervalSet()
        """Steps that every shard has; a killed shard may lose some, which are then computed again."""
        self.accepted = False
        self.ended = False

    # --- the program's side ---

    def schedule(self, steps: int) -> None:
        """Let the steps below `steps` be leased."""
        self.scheduled = max(self.scheduled, steps)
        self._wake.set()

    def close(self) -> None:
        """Let the job end once all scheduled steps are complete."""
        self.closed = True
        self._wake.set()

    def stop(self) -> None:
        """Interrupt the run, as Ctrl-C does; shards save their state."""
        self.stopping = True
        self._wake.set()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until a condition holds or the run has ended, for at most `timeout_s`; return whether it holds."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not condition() and not self.ended:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0.0:
                    break
                self._changed.wait(left_s)
            return condition()

    # --- the run's side ---

    def pause(self, pause_s: float) -> None:
        """Wait for a request of the program, for at most `pause_s`; raise KeyboardInterrupt if the run is to stop."""
        waited_for = self.scheduled > len(self.complete)
        if self._wake.wait(min(pause_s, EAGER_S) if waited_for else pause_s):
            self._wake.clear()
        if self.stopping:
            raise KeyboardInterrupt

    def report(self, complete: IntervalSet) -> None:
        """Record the complete steps."""
        if self._on_report is not None:
            self._on_report(complete)
        with self._changed:
            self.complete = complete
            self._changed.notify_all()

    def tell(self, *, accepted: bool = False, ended: bool = False) -> None:
        """Record that the coordinator has accepted the job, or that the run has ended."""
        with self._changed:
            self.accepted, self.ended = self.accepted or accepted, self.ended or ended
            self._changed.notify_all()


class CallbackFailed(Exception):
    """A callback raised, which is the cause: the run is to be saved and ended."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"a callback raised {type(error).__name__}: {error}")
        self.error = error


class RunFollower(Protocol):
    """Follows a run, in the thread that supervises it."""

    callbacks: Callbacks

    def look(self, follow: Follow) -> None:
        """Ask for new events and handle them, many times a second; CallbackFailed if a callback raised."""
