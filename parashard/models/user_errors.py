"""Errors as users see them: with the line of their own code that raised one, and without internal frames.

The user's code is all code but this package, the services, the standard library and installed libraries.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from parashard.errors import ParashardError
from parashard.process.run_files import short_path

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_HEADING = "Exception encountered when calling"
"""Start of a Keras message whose next line states the error."""
_WITHIN = "Traceback (most recent call last):"
"""End of the first line of a message that contains another error's traceback, as JAX's of a callback."""
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)')
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_OURS = ("parashard", "parashard_coordinator", "parashard_server", "parashard_worker")


def described(error: BaseException) -> str:
    """Return an error in one line, after the innermost line of the user's code in its traceback."""
    # Such as "model.py:31: KeyError: 'w'". An error that parashard raised itself is returned without a line.
    if isinstance(error, ParashardError):
        return _first_line(error)
    line = line_of(error)
    return f"{line}: {_named(error)}" if line else _named(error)


def named_with_line(error: BaseException) -> str:
    """Return an error for the end of a message, such as "KeyError: 'w' (model.py:31)"."""
    line = line_of(error)
    return f"{_named(error)} ({line})" if line else _named(error)


def place_of(method: Any) -> str:
    """Return where a user's method begins, as "model.py:12: "; empty for any other method."""
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    if not isinstance(code, CodeType) or not _is_the_users(code.co_filename):
        return ""
    return f"{short_path(code.co_filename)}:{code.co_firstlineno}: "


def users_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code that a frame was called from, as "model.py:31"; "" without one."""
    while frame is not None and not _is_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def with_users_lines(error: BaseException) -> BaseException:
    """Return an error without its traceback; those of its causes keep only frames of the user's code."""
    cause = error.__cause__
    while cause is not None:
        frames, trace = [], cause.__traceback__
        while trace is not None:
            if _is_the_users(trace.tb_frame.f_code.co_filename):
                frames.append(trace)
            trace = trace.tb_next
        kept: TracebackType | None = None
        for frame in reversed(frames):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        cause.__traceback__ = kept
        cause = cause.__cause__
    return error.with_traceback(None)


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


def _named(error: BaseException) -> str:
    said = _first_line(error)
    within = _lines(error)
    if within and within[0].endswith(_WITHIN):
        return within[-1].strip()  # has its own type in front
    if said and type(error).__module__.partition(".")[0] in _OURS:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _first_line(error: BaseException) -> str:
    """Return an error's message as valid UTF-8: file names in it may have undecodable bytes."""
    lines = _lines(error)
    return " ".join(lines[: 2 if lines and lines[0].startswith(_HEADING) else 1])


def _lines(error: BaseException) -> list[str]:
    said = _STYLE.sub("", str(error)).encode("utf-8", "replace").decode()
    return [line for line in said.splitlines() if line.strip()]


def line_of(error: BaseException) -> str:
    """Return the innermost line of the user's code in an error's traceback; "" without one."""
    frames = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)]
    lines = _lines(error)
    if lines and lines[0].endswith(_WITHIN):
        frames += [(found[1], found[2]) for found in map(_FRAME.match, lines) if found]
    users = [(file, line) for file, line in frames if _is_the_users(file)]
    return f"{short_path(users[-1][0])}:{users[-1][1]}" if users else ""


def _is_the_users(file: str) -> bool:
    return not file.startswith("<") and not os.path.abspath(file).startswith(_not_the_users())


@functools.cache
def _not_the_users() -> tuple[str, ...]:
    """Return the folders whose code is not the user's."""
    standard = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed = {folder for folder in sys.path[1:] if any(Path(folder).glob("*.dist-info"))}  # such as by pip --target
    specs = filter(None, map(importlib.util.find_spec, _OURS))
    ours = {folder for spec in specs for folder in spec.submodule_search_locations or ()}
    return tuple(f"{os.path.abspath(folder)}{os.sep}" for folder in standard | installed | ours)
