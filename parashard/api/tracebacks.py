"""Tracebacks of the package's calls: errors leave a call with the user's own lines, and none of ours.

Knows no call. Called by what users call.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from parashard.errors import ParashardError
from parashard.models.user_errors import with_users_lines

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def warn(text: str) -> None:
    """Warn the user, at the line that made the call."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "parashard":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def trim_traceback(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a call whose expected errors are raised without internal frames; their causes keep the user's lines."""

    @functools.wraps(call)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return call(*args, **kwargs)
        except ParashardError as error:
            failure = with_users_lines(error)
        raise failure

    return called
