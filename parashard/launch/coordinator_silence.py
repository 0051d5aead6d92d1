"""CoordinatorSilence: the launcher's timeouts of the coordinator.

Pure: `now_s` is an argument. A coordinator that starts reads and hashes the data before it can answer; the timeout of
a serving one begins when it is first seen to serve. Called by `parashard.launch.running`.
Implements rule P22 of docs/protocol.md.
"""

from __future__ import annotations


class CoordinatorSilence:
    """Decides when a coordinator is to be killed.

    Parameters
    ----------
    silence_s : float
        Timeout of a coordinator that serves.
    start_s : float
        Timeout of a coordinator that is starting.
    """

    def __init__(self, silence_s: float, start_s: float) -> None:
        self._silence_s = silence_s
        self._start_s = start_s
        self._since_s = 0.0
        self._serves = self._told = False

    def started(self, now_s: float) -> None:
        """Record that a coordinator was started."""
        self._since_s, self._serves, self._told = now_s, False, False

    def heard(self, now_s: float) -> None:
        """Record an answer."""
        self._since_s, self._serves = now_s, True

    def look(self, now_s: float, *, serves: bool) -> tuple[str, bool]:
        """Return a message for the user, or "", and whether to kill the coordinator.

        `serves`: it has written its address.
        """
        if serves and not self._serves:
            self.heard(now_s)
        silent_s = now_s - self._since_s
        if self._serves and silent_s > self._silence_s:
            self._since_s = now_s
            return f"the coordinator has not answered for {silent_s:.0f} s; it is killed", True
        if not self._serves and silent_s > self._start_s:
            self._since_s = now_s
            return f"the coordinator has not come up within {self._start_s:.0f} s; it is killed", True
        if not self._serves and not self._told and silent_s > self._silence_s:
            self._told = True
            return f"the coordinator has been starting for {silent_s:.0f} s; it has {self._start_s:.0f} s", False
        return "", False
