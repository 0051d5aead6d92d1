"""AwaitedWorkers: what people are told while a run has no workers.

Pure: `now_s` is an argument. A run that starts none waits for ever, since nobody knows when they come; those of a
script first run it up to the call that trains. Either says what it waits for.
Called by `parashard.launch.running`.
"""

from __future__ import annotations

REMIND_S = 60.0
IMPORT_S = 5.0
"""How long the workers of a script may take without a word."""


class AwaitedWorkers:
    """Decides when to say that the run waits.

    Parameters
    ----------
    reason : str
        What it waits for.
    after_s : float
        How long there are none before it is said.
    """

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        self._reason, self._after_s = reason, after_s
        self._since_s: float | None = None
        self._next_s = 0.0

    def look(self, now_s: float, live: int) -> str:
        """Return what to say, with so many workers now; "": nothing."""
        if live:
            self._since_s = None
            return ""
        if self._since_s is None:
            self._since_s, self._next_s = now_s, now_s + self._after_s
        if now_s < self._next_s:
            return ""
        self._next_s = now_s + REMIND_S
        waited_s = now_s - self._since_s
        since = f" for {waited_s:.0f} s" if waited_s else ""
        return f"no workers{since}: {self._reason}"
