"""RunFollower: follows a run in progress, for callbacks; and the error with which a callback ends the run.

Knows no callback. `parashard.launch.running` calls it; `parashard.api.callback_follower` implements it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from parashard._proto import coordinator_pb2 as pb

Follow = Callable[[pb.FollowRequest], pb.FollowReply]
"""Asks the coordinator, once; the run's id is filled in."""


class CallbackFailed(Exception):
    """A callback raised, which is the cause: the run is to be saved and ended."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"a callback raised {type(error).__name__}: {error}")
        self.error = error


class RunFollower(Protocol):
    """Follows a run, in the thread that supervises it."""

    @property
    def decides(self) -> bool:
        """Whether a callback may stop the run or change the learning rate."""

    @property
    def ahead(self) -> int | None:
        """How many milestones training may be ahead of callbacks; None: as many as can be kept."""

    @property
    def stores_evaluated(self) -> bool:
        """Whether a callback uses the weights that were evaluated."""

    def look(self, follow: Follow) -> None:
        """Ask what has happened, and act on it; called many times a second until the job is over.

        Raises
        ------
        CallbackFailed
            If what it calls raised.
        RetryLater
            If the coordinator does not answer now.
        """
