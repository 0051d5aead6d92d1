"""CoordinatorSilence: how long the coordinator may be silent before the launcher kills it (P22).

Pure: `now_s` is an argument. A coordinator that starts reads and hashes the data before it can answer; its silence
while it serves begins when it is first seen to serve. Called by `parashard.launch.running`.
"""

from __future__ import annotations


class CoordinatorSilence:
    """What one coordinator after the other owes its launcher.

    Parameters
    ----------
    silence_s : float
        A coordinator that serves and has not answered for longer is to be killed.
    start_s : float
        Likewise, one that has been starting for longer.
    """

    def __init__(self, silence_s: float, start_s: float) -> None:
        self._silence_s = silence_s
        self._start_s = start_s
        self._since_s = 0.0
        self._serves = self._told = False

    def started(self, now_s: float) -> None:
        """Take note that a coordinator was started."""
        self._since_s, self._serves, self._told = now_s, False, False

    def heard(self, now_s: float) -> None:
        """Take note of an answer."""
        self._since_s, self._serves = now_s, True

    def look(self, now_s: float, *, serves: bool) -> tuple[str, bool]:
        """Return what to tell people, or "", and whether the coordinator is to be killed.

        `serves`: it has said where it listens.
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
