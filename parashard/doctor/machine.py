"""Measures the machine that this process runs on: versions, memory, descriptors, GPUs, names, clock, store."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import socket
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

from parashard import __version__
from parashard.doctor.facts import Machine, Shared
from parashard.errors import ConfigurationError, ParashardError, Unavailable
from parashard.process import cuda
from parashard.process.addresses import interfaces, own_host
from parashard.process.resources import cores
from parashard.store import open_store

LIBRARIES = ("numpy", "grpcio", "protobuf", "cryptography")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
SHM = Path("/dev/shm")
PROBE_BYTES_MAX = 64
FOLDER = "doctor"
"""Folder of probe files in the store."""

_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


def machine() -> Machine:
    """Measure this machine."""
    total, free = memory()
    shm_problem, shm_free = _shared_memory()
    gpus, gpu_problem = _gpus()
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        version=__version__,
        python=platform.python_version(),
        libraries={name: found for name in LIBRARIES if (found := _version(name))},
        kernel=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cores=cores(),
        load=os.getloadavg()[0],
        memory_bytes=total,
        memory_free_bytes=free,
        shm_problem=shm_problem,
        shm_free_bytes=shm_free,
        descriptors=_limit(soft),
        descriptors_most=_limit(most),
        gpus=gpus,
        gpu_problem=gpu_problem,
        proxies=tuple(sorted(name for name in os.environ if name.lower() in PROXIES and os.environ[name])),
        own_name=socket.gethostname(),
        own_address=_own_address(),
        addresses=tuple((one.name, one.address) for one in interfaces()),
        clock_set=_clock_set(),
    )


def _version(name: str) -> str:
    try:
        return version_of(name)
    except PackageNotFoundError:
        return ""


def _limit(value: int) -> int:
    return 2**31 if value == resource.RLIM_INFINITY else value


def memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return the total and the free memory in bytes, in a container within its limit."""
    # A container's usage includes inactive cached files, which the kernel reclaims: they count as free.
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE))
    total, free = 1024 * int(fields["MemTotal"]), 1024 * int(fields["MemAvailable"])
    for limit, usage, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),  # cgroup version 2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):
            allowed, used = int((groups / limit).read_text()), int((groups / usage).read_text())
            with suppress(OSError):
                cached = re.search(rf"^{cache} (\d+)$", (groups / stat).read_text(), re.MULTILINE)
                used = max(0, used - int(cached[1] if cached else 0))
            total, free = min(total, allowed), min(free, max(0, allowed - used))
    return total, free


def _shared_memory() -> tuple[str, int]:
    try:
        found = os.statvfs(SHM)
        free = found.f_bavail * found.f_frsize
    except OSError as error:
        return f"{SHM}: {error.strerror}", 0
    if not os.access(SHM, os.W_OK | os.X_OK):
        return f"{SHM} may not be written by this user", free
    return "" if free else f"{SHM} is full", free


def _gpus() -> tuple[tuple[str, ...], str]:
    """Return the names of the GPUs, and why they cannot be used; without CuPy the names are the driver's."""
    listed = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            found = re.search(r"^Model:\s*(.+)$", information.read_text(), re.MULTILINE)
            listed.append(found[1] if found else "a GPU")
    try:
        return tuple(cuda.device_name(index) for index in range(cuda.device_count())), ""
    except (ConfigurationError, Unavailable) as error:
        return tuple(listed), error.message if listed else ""


def _own_address() -> str:
    try:
        return own_host("auto")
    except ConfigurationError:
        return ""


def _clock_set() -> bool | None:
    class Timex(ctypes.Structure):
        _fields_ = [("modes", ctypes.c_uint), ("rest", ctypes.c_byte * 512)]  # modes 0: read only

    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(Timex()))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def shared(url: str, probe: str) -> Shared:
    """Write a probe file into a store; the caller deletes it."""
    since_s = time.monotonic()
    try:
        open_store(url).replace(f"{FOLDER}/{probe}", probe.encode())
    except (ParashardError, OSError, ImportError) as error:
        return Shared(url=url, problem=_words(error))
    return Shared(url=url, write_s=time.monotonic() - since_s)


def unseen(url: str, probes: list[str]) -> list[str]:
    """Return the probe files of a store that cannot be read here."""
    store, missing = open_store(url), []
    for probe in probes:
        try:
            found = store.read(f"{FOLDER}/{probe}", PROBE_BYTES_MAX)
        except (ParashardError, OSError):
            found = b""
        if found != probe.encode():
            missing.append(probe)
    return missing


def forget(url: str, probe: str) -> None:
    """Delete a probe file."""
    with suppress(ParashardError, OSError, ImportError):
        open_store(url).delete(f"{FOLDER}/{probe}")


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in errno.errorcode:
        return error.strerror or str(error)
    return str(error)
