"""Problems: what is wrong with a job now, each told once when it begins and once when it is over.

Pure. Owns the list that every screen shows as current; decides nothing. `parashard_coordinator.core.core_state` has one
and makes events of what it returns; whoever notices a problem names it by a key of its own.
"""

from __future__ import annotations

PROBLEMS_MAX = 64  # at once; further ones are told as events only


class Problems:
    """The problems that hold now, by key."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._texts

    @property
    def texts(self) -> list[str]:
        """The texts of all that hold, the oldest first."""
        return list(self._texts.values())

    def begin(self, key: str, text: str) -> bool:
        """Note that a problem holds, with the text of now; return whether it is new."""
        is_new = key not in self._texts
        if not is_new or len(self._texts) < PROBLEMS_MAX:
            self._texts[key] = text
        return is_new

    def end(self, key: str) -> str:
        """Note that a problem is over; return its text, or "" if it did not hold."""
        return self._texts.pop(key, "")
