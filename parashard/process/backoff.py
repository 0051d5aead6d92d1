"""Back-off: the pause before a process is restarted, and before a failed write is retried. Pure."""

BACKOFF_MAX_S = 5.0
RETRY_FIRST_S = 1.0
RETRY_MAX_S = 30.0


def backoff_s(first_s: float, exits: int) -> float:
    """Return the pause before a restart: none after one exit in a row, then `first_s`, doubled up to BACKOFF_MAX_S."""
    return 0.0 if exits <= 1 else min(BACKOFF_MAX_S, first_s * 2.0 ** min(exits - 2, 30))


def retry_pause_s(failures: int) -> float:
    """Return the pause after a number of failed writes in a row: it doubles from RETRY_FIRST_S up to RETRY_MAX_S."""
    return 0.0 if failures <= 0 else min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(failures - 1, 30))


STEADY_S = 5.0
"""How long there must be no failure until it is over: an almost full disk fails intermittently."""


class Debounce:
    """One kind of failure, over when none has occurred for `steady_s`."""

    def __init__(self, steady_s: float = STEADY_S) -> None:
        self._steady_s = steady_s
        self.present = False
        """Its start has been reported, but not its end."""
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
