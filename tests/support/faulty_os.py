"""The operating system's calls, watched or failing, for a module that calls them as `os.name(...)`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class WatchedOs:
    """Passes every call on, and calls `before(name)` and `after(name)` around each of `NAMES`."""

    NAMES = (
        *("open", "write", "fsync", "close", "link", "replace", "unlink", "rmdir"),
        *("makedirs", "scandir", "stat", "fstat"),
    )

    def __init__(self, before: Callable[[str], None], after: Callable[[str], None] = lambda name: None) -> None:
        self._before = before
        self._after = after
        self._watching = True

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.NAMES or not self._watching:
            return real

        def watched(*arguments: Any, **options: Any) -> Any:
            self._unwatched(self._before, name)
            result = real(*arguments, **options)
            self._unwatched(self._after, name)
            return result

        return watched

    def _unwatched(self, look: Callable[[str], None], name: str) -> None:
        """Call `look`, whose own calls are not watched."""
        self._watching = False
        try:
            look(name)
        finally:
            self._watching = True


class FailingOs(WatchedOs):
    """Fails the n-th call (counted from 1) of one name with an error number; `failed` tells whether it did."""

    def __init__(self, name: str, nth: int, number: int) -> None:
        super().__init__(self._fail)
        self._left = {name: nth}
        self._number = number

    @property
    def failed(self) -> bool:
        return any(left <= 0 for left in self._left.values())

    def _fail(self, name: str) -> None:
        if name in self._left:
            self._left[name] -= 1
            if self._left[name] == 0:
                raise OSError(self._number, os.strerror(self._number))


class Killed(BaseException):
    """The process is no more: nothing that it would still have done happens."""


class DyingOs(WatchedOs):
    """Ends the process at its n-th call (counted from 1): that call and all later ones do nothing but say so."""

    def __init__(self, nth: int) -> None:
        super().__init__(self._die)
        self._left = nth

    def _die(self, name: str) -> None:
        self._left -= 1
        if self._left <= 0 and name != "close":  # the system closes what a dead process had open
            raise Killed
