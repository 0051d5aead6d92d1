"""Problems: the present problems of a job, each reported once when it begins and once when it is over.

Pure. Owns the list that every screen shows as current; decides nothing. `parashard_coordinator.core.job_record` has one
and makes events of its results; each source of problems uses its own keys.
"""

from __future__ import annotations

PROBLEMS_MAX = 64  # at once; further ones are reported as events only


class Problems:
    """The present problems, by key."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._texts

    @property
    def texts(self) -> list[str]:
        """The texts of all problems, the oldest first."""
        return list(self._texts.values())

    def text(self, key: str) -> str:
        """Return a problem's present text, "" if there is none."""
        return self._texts.get(key, "")

    def begin(self, key: str, text: str) -> bool:
        """Record a problem with its present text; return whether it is new."""
        is_new = key not in self._texts
        if not is_new or len(self._texts) < PROBLEMS_MAX:
            self._texts[key] = text
        return is_new

    def end(self, key: str) -> str:
        """Remove a problem; return its text, or "" if there was none."""
        return self._texts.pop(key, "")
