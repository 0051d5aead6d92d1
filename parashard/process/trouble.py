"""Trouble: something that fails now and then, told in two lines: when it begins, and when it has been over for a while.

Pure: `now_s` is an argument. Called by the coordinator and the shards.
"""

STEADY_S = 5.0
"""An almost full disk fails and works by turns: so long it must have worked before people hear that it is over."""


class Trouble:
    """One kind of failure, over when none has come for `steady_s`."""

    def __init__(self, steady_s: float = STEADY_S) -> None:
        self._steady_s = steady_s
        self.present = False
        """People have heard that it began, and not that it is over."""
        self._failed_s = 0.0  # when it was last seen to fail

    def begins(self, now_s: float) -> bool:
        """Note that it fails now; return whether that is to be told."""
        told, self.present, self._failed_s = self.present, True, now_s
        return not told

    def ends(self, now_s: float) -> bool:
        """Note that it works now; return whether that is to be told."""
        over = self.present and now_s - self._failed_s >= self._steady_s
        self.present = self.present and not over
        return over
