"""The two tiers: how much `make test` draws, and how much `make test-all`.

The tier is the profile of Hypothesis that is loaded (`tests/conftest.py`), so one flag of pytest chooses:
`--hypothesis-profile full`.
"""

from __future__ import annotations

from hypothesis import settings

QUICK = "quick"

settings.register_profile(QUICK, deadline=None, max_examples=30, derandomize=True)
settings.register_profile("full", deadline=None, max_examples=100, print_blob=True)


def by_tier(*, quick: int, full: int) -> int:
    """Return a number of the tier that runs, such as how many kills there are."""
    return full if settings.get_current_profile_name() == "full" else quick


def fewer(divisor: int) -> settings:
    """Return settings with a fraction of the tier's examples, for a test whose examples take long."""
    return settings(max_examples=settings().max_examples // divisor)
