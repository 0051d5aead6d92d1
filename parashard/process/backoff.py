"""Back-off: the pause before a process that ended is started again, and before a write that failed is tried again.

Pure. For `parashard run`, the coordinator and the shards.
"""

BACKOFF_MAX_S = 5.0
RETRY_FIRST_S = 1.0
RETRY_MAX_S = 30.0


def backoff_s(first_s: float, exits: int) -> float:
    """Return the pause after so many exits in a row.

    The first is taken for a preemption: none. From the second on it doubles from `first_s`, up to BACKOFF_MAX_S.
    """
    return 0.0 if exits <= 1 else min(BACKOFF_MAX_S, first_s * 2.0 ** min(exits - 2, 30))


def retry_pause_s(failures: int) -> float:
    """Return the pause after so many writes in a row that failed: it doubles from RETRY_FIRST_S up to RETRY_MAX_S."""
    return 0.0 if failures <= 0 else min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(failures - 1, 30))
