"""Restarts: when a shard or a worker of the local cluster that ended is started again.

Pure: `now_s` is an argument. The first exit is taken for a preemption: no pause. From the second in a row on there is
one, which doubles. A completed step of the job resets pause and budget, so a job that makes progress is never given up,
however often its processes are killed.
"""

from __future__ import annotations

from parashard.process.backoff import backoff_s


class Restarts:
    """Back-off and budget of the processes of one job, by name.

    Parameters
    ----------
    backoff_s : float
        Pause after the second exit in a row.
    budget : int
        Exits in a row, without a completed step in between, after which the job is given up.
    """

    def __init__(self, backoff_s: float, budget: int) -> None:
        self._backoff_s = backoff_s
        self._budget = budget
        self._exits_in_a_row: dict[str, int] = {}
        self._not_before_s: dict[str, float] = {}

    def step_completed(self) -> None:
        """Reset back-off and budget of every process."""
        if self._exits_in_a_row:
            self._exits_in_a_row.clear()

    def exited(self, process: str, now_s: float, at_least_s: float = 0.0) -> bool:
        """Record an exit, with a pause of at least so long; return False when the budget is spent."""
        count = self._exits_in_a_row[process] = self._exits_in_a_row.get(process, 0) + 1
        self._not_before_s[process] = now_s + max(at_least_s, backoff_s(self._backoff_s, count))
        return count <= self._budget

    def pause(self, process: str, now_s: float, pause_s: float) -> None:
        """Record an exit that does not count, with a pause."""
        self._not_before_s[process] = now_s + pause_s

    def may_start(self, process: str, now_s: float) -> bool:
        """Tell whether a process that does not run may be started now."""
        return now_s >= self._not_before_s.get(process, now_s)
