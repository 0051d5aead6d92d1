"""Anonymous memory that processes of one host share: creating, sealing, checking, mapping and copying.

Knows descriptors and bytes, not their content. A memfd has no name in any folder and is freed with its last user, so
that nothing has to be cleaned up however a process ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from parashard.errors import MalformedFrame
from parashard.process.lanes import Lanes, cut
from parashard.process.resources import cores
from parashard.protocol.messages import Buffers

SIZE_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
"""With these the memory cannot be truncated while a process has it mapped, which would die of SIGBUS."""
FUTURE_WRITE_SEAL = 0x10  # Linux 5.1; the `fcntl` of Python 3.11 has no name for it

Bytes = NDArray[np.uint8]
KEPT_GIL_BYTES = 16 << 10
COPY_THREADS_MAX = 4
CORES_PER_COPY_THREAD = 4  # a worker's others compute, and a shard on the same host updates

lanes = Lanes(max(1, min(COPY_THREADS_MAX, cores() // CORES_PER_COPY_THREAD)))
"""The threads of this process for large copies; on fewer than eight cores only the calling one."""


def can_share() -> bool:
    """Return whether this system has memfds."""
    return hasattr(os, "memfd_create")


def create(name: str, size_bytes: int) -> int:
    """Return a descriptor of new zeroed memory of at least a byte, only for this user, or raise OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, max(size_bytes, 1))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int, *, writable: bool) -> None:
    """Fix the length for ever; unless `writable`, refuse every later mapping that could write."""
    # Existing mappings keep their rights: a writer maps first, then seals.
    if not writable:
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SIZE_SEALS | FUTURE_WRITE_SEAL | fcntl.F_SEAL_SEAL)
            return
        except OSError:  # an older kernel: that others get a read-only descriptor is the only guard
            pass
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)


def read_only(descriptor: int) -> int:
    """Return another descriptor of the same memory, through which it cannot be written."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def mapped(descriptor: int, *, writable: bool) -> Bytes:
    """Return the memory as an array, mapped until its last view is freed; the descriptor stays the caller's."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return np.frombuffer(mmap.mmap(descriptor, 0, mmap.MAP_SHARED, access), np.uint8)


def check(descriptor: int, size_bytes: int, what: str) -> None:
    """Raise MalformedFrame if another process's memory has an unexpected length, or could be truncated."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != max(size_bytes, 1):
        raise MalformedFrame(f"{what}: expected {size_bytes} bytes of memory, found {status.st_size}")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise MalformedFrame(f"{what}: expected memory that can be sealed, found a file") from None
    if seals & SIZE_SEALS != SIZE_SEALS:
        raise MalformedFrame(f"{what}: its length is not sealed (seals {seals:#x})")


def copy(source: Bytes | memoryview, target: Bytes | memoryview) -> None:
    """Copy bytes between buffers of one length, while other threads run."""
    # NumPy releases the GIL while it copies, an assignment between memory views keeps it; the speed is the same, but
    # getting the GIL back from a thread that computes takes longer than copying a few bytes.
    if source.nbytes <= KEPT_GIL_BYTES:
        _view(target)[:] = _view(source)
        return
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def gather(source: Buffers, target: Bytes) -> None:
    """Copy the whole of `source` to the start of `target`, on several threads if it is large."""
    if 2 * source.nbytes < lanes.divides_from_bytes:
        _gather(source.pieces, target)
    else:
        lanes.each(lambda run: _gather(source.run(run.start, run.stop), target[run]), copy_runs(source.nbytes))


def scatter(source: Bytes | memoryview, target: Buffers, begin: int) -> None:
    """Copy `source` into `target` from byte `begin` on, on several threads if it is large."""

    def some(run: slice) -> None:
        _scatter(source[run], target.run(begin + run.start, begin + run.stop))

    if 2 * source.nbytes < lanes.divides_from_bytes:
        _scatter(source, target.run(begin, begin + source.nbytes))
    else:
        lanes.each(some, copy_runs(source.nbytes))


def copy_runs(size_bytes: int) -> list[slice]:
    """Split a copy of `size_bytes` into runs, in order; a single one for a small copy."""
    return cut(size_bytes, 2 * size_bytes, lanes.threads)


def _gather(pieces: Sequence[memoryview], target: Bytes) -> None:
    position = 0
    for piece in pieces:
        copy(piece, target[position : position + piece.nbytes])
        position += piece.nbytes


def _scatter(source: Bytes | memoryview, pieces: Sequence[memoryview]) -> None:
    position = 0
    for piece in pieces:
        copy(source[position : position + piece.nbytes], piece)
        position += piece.nbytes


def _view(content: Bytes | memoryview) -> memoryview:
    return content.data if isinstance(content, np.ndarray) else content
