"""Restarts: when a process of the local cluster that ended is started again.

Pure: `now_s` is an argument. Back-off doubles with every exit in a row; a completed step of the job resets it and the
budget, so a job that makes progress is never given up, however often its workers are killed.
"""

from __future__ import annotations

BACKOFF_MAX_S = 5.0


class Restarts:
    """Back-off and budget of the workers of one job.

    Parameters
    ----------
    backoff_s : float
        Pause before the first restart.
    budget : int
        Exits in a row, without a completed step in between, after which the job is given up.
    """

    def __init__(self, backoff_s: float, budget: int) -> None:
        self._backoff_s = backoff_s
        self._budget = budget
        self._exits_in_a_row: dict[int, int] = {}
        self._not_before_s: dict[int, float] = {}

    def step_completed(self) -> None:
        """Reset back-off and budget of every worker."""
        if self._exits_in_a_row:
            self._exits_in_a_row.clear()

    def exited(self, index: int, now_s: float) -> bool:
        """Record an exit; return False when the budget is spent."""
        count = self._exits_in_a_row[index] = self._exits_in_a_row.get(index, 0) + 1
        self._not_before_s[index] = now_s + min(BACKOFF_MAX_S, self._backoff_s * 2.0 ** min(count - 1, 30))
        return count <= self._budget

    def may_start(self, index: int, now_s: float) -> bool:
        """Tell whether a worker that does not run may be started now."""
        return now_s >= self._not_before_s.get(index, now_s)
