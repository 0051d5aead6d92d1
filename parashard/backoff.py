"""Back-off: the pause before a process that ended is started again. Pure; for `parashard run` and the coordinator."""

BACKOFF_MAX_S = 5.0


def backoff_s(first_s: float, exits: int) -> float:
    """Return the pause after so many exits in a row.

    The first is taken for a preemption: none. From the second on it doubles from `first_s`, up to BACKOFF_MAX_S.
    """
    return 0.0 if exits <= 1 else min(BACKOFF_MAX_S, first_s * 2.0 ** min(exits - 2, 30))
