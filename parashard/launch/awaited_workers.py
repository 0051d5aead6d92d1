"""AwaitedWorkers: what people are told while a run that starts no workers has none.

Pure: `now_s` is an argument. Such a run waits for ever, since nobody knows when its workers come, and says what for.
Called by `parashard.launch.running`.
"""

from __future__ import annotations

REMIND_S = 60.0


class AwaitedWorkers:
    """Decides when to say that the run waits.

    Parameters
    ----------
    command : str
        What joins it.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._since_s: float | None = None
        self._next_s = 0.0

    def look(self, now_s: float, live: int) -> str:
        """Return what to say, with so many workers now; "": nothing."""
        if live:
            self._since_s = None
            return ""
        if self._since_s is None:
            self._since_s = self._next_s = now_s
        if now_s < self._next_s:
            return ""
        self._next_s = now_s + REMIND_S
        waited_s = now_s - self._since_s
        since = f" for {waited_s:.0f} s" if waited_s else ""
        return f"no workers{since}: the job waits until one joins: {self._command}"
