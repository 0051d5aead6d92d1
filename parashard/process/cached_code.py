"""Loops that Numba compiles to run without the GIL; this user's later processes load the machine code.

Numba's cache holds pickles, and loading one runs code. So the cache is in a folder that only this user may write;
without one every process compiles. Of a loop's dependencies Numba checks only the loop's own file; so each loop has a
folder named by a digest of all of them, and no process loads code of another text, compiler or CPU.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_config_lock = threading.Lock()


class Vector(NamedTuple):
    """The kind of an array argument, contiguous at any address; a scalar's kind is the name of its type."""

    dtype: str
    written: bool = True
    dimensions: int = 1


class Loop:
    """A function that is loaded or compiled for one kind of arguments, at its first call."""

    def __init__(self, function: Callable[..., Any], *kinds: Vector | str, sources: Iterable[Path] = ()) -> None:
        self.function = function
        self.kinds = kinds
        self._sources = sources

    def __call__(self, *arguments: Any) -> Any:
        """Run the loop; TypeError for arguments of other kinds."""
        return self.code(*arguments)

    @cached_property
    def code(self) -> Callable[..., Any]:
        """The compiled function."""
        folder = self._folder()
        if folder is not None:
            try:
                return self._compiled(folder)
            except Exception:  # noqa: BLE001  # pickle's and the system's, for a damaged file or a full disk
                shutil.rmtree(folder, ignore_errors=True)
        return self._compiled(None)

    def _compiled(self, folder: Path | None) -> Callable[..., Any]:
        import numba  # loads slowly

        def declared(*, cached: bool) -> Any:
            return numba.njit(nogil=True, cache=cached, error_model="numpy")(self.function)

        if folder is None:
            code = declared(cached=False)
        else:
            with _config_lock:
                config: Any = numba.config
                before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
                try:
                    code = declared(cached=True)
                finally:
                    config.CACHE_DIR = before
            if not Path(code.stats.cache_path).is_relative_to(folder):  # by NUMBA_CACHE_LOCATOR_CLASSES
                code = declared(cached=False)
        code.compile(tuple(map(_type, self.kinds)))
        code.disable_compile()
        return code  # type: ignore[no-any-return]

    def _folder(self) -> Path | None:
        """Return the folder of this loop's code; None if it cannot be cached."""
        private = private_folder()
        if private is None:
            return None
        code = self.function.__code__
        numbers = {
            name: value
            for name, value in self.function.__globals__.items()
            if isinstance(value, int | float | np.generic)
        }
        parts = [repr(self.kinds), repr(sorted(numbers.items())), code.co_code.hex(), *environment()]
        parts += [path.read_text() for path in sorted({Path(__file__), Path(code.co_filename), *self._sources})]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return private / f"{code.co_name}-{digest[:32]}"


def loop(*kinds: Vector | str) -> Callable[[Callable[..., Any]], Loop]:
    """Declare a loop, by the kinds of its arguments."""
    return lambda function: Loop(function, *kinds)


def inlined(function: Callable[..., Any]) -> Any:
    """Declare a function that loops call."""
    import numba  # loads slowly

    return numba.njit(error_model="numpy")(function)


def const(kind: Vector) -> Vector:
    """Return the kind of an argument that a loop does not write."""
    return kind._replace(written=False)


def private_folder() -> Path | None:
    """Return the folder of this user's machine code; None if there is none that only this user may write."""
    chosen = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(chosen).expanduser().absolute() / "parashard-numba"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError):
        return None
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return folder if own and os.access(folder, os.W_OK) else None


@cache
def environment() -> tuple[str, ...]:
    """Return the dependencies of all machine code: Python, the compilers, their settings, and the CPU."""
    import llvmlite.binding
    import numba

    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    settings.pop("NUMBA_CACHE_DIR", None)
    return (
        *(sys.version, np.__version__, numba.__version__, llvmlite.__version__, repr(sorted(settings.items()))),
        *(llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()),
    )


def _type(kind: Vector | str) -> Any:
    from numba import types

    if isinstance(kind, str):
        return getattr(types, kind)
    element = getattr(types, kind.dtype)
    return types.Array(element, kind.dimensions, "C", readonly=not kind.written, aligned=False)
