"""Machine code of the compiled loops: kept in files from an earlier start, loaded without Numba, called by ctypes.

Owns the files, of which each has one loop and is named by all that its code depends on: sources, versions of the
compilers, the CPU. To load a file is to run it: one that another user owns or may write, or that is not whole, is
compiled again and replaced. Where no file can be written every start compiles. Called by
`parashard_server.state.kernels.fused`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ENTRY = "parashard_kernel"
"""Name of the function in each object file."""
REFUSED = -1
"""What it returns for arrays that it does not fit."""

MAGIC = b"parashard machine code 1\n"
FILE_BYTES_MAX = 1 << 20
_SOURCES = ("compiling.py", "index_loops.py", "loops.py", "machine_code.py", "row_loops.py", "rules.py")
_COMPILERS = ("numba", "llvmlite")
_CPU_FIELDS = {
    *("vendor_id", "cpu family", "model", "model name", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
}

_engines: list[Any] = []  # code is never unloaded: a thread may still run it


class Ndarray(ctypes.Structure):
    """The first fields of an ndarray, whose layout is compiled into every extension of NumPy 1 and 2."""

    _fields_ = (
        ("head", ctypes.c_char * object.__basicsize__),
        ("data", ctypes.c_void_p),
        ("dimensions", ctypes.c_int),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


def function(name: str, arrays: int) -> Callable[..., int]:
    """Return the machine code of a loop as a function; compile it, or load what an earlier start has compiled.

    Parameters
    ----------
    name : str
        Of the loop in `parashard_server.state.kernels.loops`, `row_loops` or `index_loops`.
    arrays : int
        How many arrays it takes.

    Returns
    -------
    callable
        Takes the arrays, and the scalars as bytes: float32, end to end. Releases the GIL. Returns REFUSED, having
        done nothing, for arrays that are not contiguous and vectors of different lengths; the caller ensures the
        elements' types.
    """
    assert _layout_is_known(), f"numpy {np.__version__} has another layout of arrays than its extensions know"
    key = _key(name)
    code = None if key is None else _kept(name, key)
    if code is None:
        from parashard_server.state.kernels import compiling, index_loops, loops, row_loops  # noqa: F401  # they declare theirs

        code = compiling.object_file(name)
        if key is not None:
            _keep(name, key, code)
    address = _loaded(code)
    parameters: list[type[Any]] = [*[ctypes.py_object] * arrays, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(ctypes.c_int64, *parameters)(address)


def _loaded(code: bytes) -> int:
    """Load an object file for as long as the process lives; return the address of its function."""
    import llvmlite.binding as llvm  # beneath Numba, which costs ten times as much to import

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address(ENTRY))


def _layout_is_known() -> bool:
    probe = np.zeros((3, 5), np.float32)[:, 2]
    seen = Ndarray.from_address(id(probe))
    return (seen.data, seen.dimensions, seen.shape[0], seen.strides[0]) == (probe.ctypes.data, 1, 3, 20)


def _key(name: str) -> str | None:
    """Return the digest of all that the code of a loop depends on; None where that cannot be known."""
    settings = {key: value for key, value in os.environ.items() if key.startswith("NUMBA_")}
    settings.pop("NUMBA_CACHE_DIR", None)
    parts = [name, sys.platform, sys.byteorder, str(object.__basicsize__), str(sorted(settings.items()))]
    try:
        parts += [Path(__file__).with_name(source).read_text() for source in _SOURCES]
        parts += [_version_file(compiler).read_text() for compiler in _COMPILERS]
        parts.append(_cpu())
    except OSError:
        return None
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _version_file(package: str) -> Path:
    """Return the file with the version of a package, which importing the package would only read."""
    found = find_spec(package)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"{package} is not installed")
    return Path(found.origin).with_name("_version.py")


def _cpu() -> str:
    """Return what Linux says of the first CPU's model and features."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        found = []
        for line in lines:
            field, _, value = line.partition(":")
            if not line.strip():
                break
            if field.strip() in _CPU_FIELDS:
                found.append(value.strip())
    if not found:
        raise OSError("/proc/cpuinfo names no CPU")
    return "\n".join(found)


def folders() -> list[Path]:
    """Return the folders for code, to be tried in turn: NUMBA_CACHE_DIR alone if that is set."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return [Path(chosen) / "parashard"]
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(__file__).with_name("__pycache__"), Path(user) / "parashard"]


def _path(folder: Path, name: str, key: str) -> Path:
    return folder / f"{name}-{key[:16]}.o"


def _head(key: str, code: bytes) -> bytes:
    return MAGIC + f"{key} {hashlib.sha256(code).hexdigest()}\n".encode()


def _kept(name: str, key: str) -> bytes | None:
    """Return the object file that an earlier start has kept, or None."""
    for folder in folders():
        try:
            content = _read_own(_path(folder, name, key))
        except OSError:
            continue
        code = content[len(_head(key, b"")) :]
        if content == _head(key, code) + code:
            return code
    return None


def _read_own(path: Path) -> bytes:
    """Return the bytes of a file that this user alone may write; raise OSError for any other."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{path} is not a file of this user's alone")
        return os.read(file, FILE_BYTES_MAX)
    finally:
        os.close(file)


def _keep(name: str, key: str, code: bytes) -> None:
    """Write an object file where later starts look for it; nowhere, if no folder can be written."""
    for folder in folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, unfinished = tempfile.mkstemp(dir=folder, prefix=f"{name}-", suffix=".unfinished")
        except OSError:
            continue
        try:
            with open(descriptor, "wb") as file:
                file.write(_head(key, code) + code)
            os.replace(unfinished, _path(folder, name, key))
        except OSError:
            Path(unfinished).unlink(missing_ok=True)
            continue
        return
