"""Debounce: an intermittent failure, reported once when it begins and once when it has been over for a while.

Pure: `now_s` is an argument. Called by the coordinator and the shards.
"""

STEADY_S = 5.0
"""How long it must have worked until the failure is over: an almost full disk fails intermittently."""


class Debounce:
    """One kind of failure, over when none has occurred for `steady_s`."""

    def __init__(self, steady_s: float = STEADY_S) -> None:
        self._steady_s = steady_s
        self.present = False
        """Its begin has been reported, and not its end."""
        self._failed_s = 0.0  # when it was last seen to fail

    def begins(self, now_s: float) -> bool:
        """Record a failure; return whether to report it."""
        was_present, self.present, self._failed_s = self.present, True, now_s
        return not was_present

    def ends(self, now_s: float) -> bool:
        """Record a success; return whether to report it."""
        over = self.present and now_s - self._failed_s >= self._steady_s
        self.present = self.present and not over
        return over
