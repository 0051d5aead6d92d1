"""A GPU of NumPy arrays that counts what it is asked for, and does it as late as it may: at a wait.

Kernels are the reference, and may be called only by a thread that has made the GPU its own. They take only vectors that
lie on the GPU; copies only one of them and one of the host.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from parashard.errors import QueueFull
from parashard.plan.state import COUNTER, COUNTER_BYTES
from parashard.plan.variables import Float32s
from parashard_server.state import storage
from support import reference_rules as reference
from support.late_cuda import Array


class Vector(np.ndarray):
    """Memory of the GPU: its views are, too."""


class LateDevice:
    """See `parashard_server.state.cuda_storage.ShardDevice`."""

    def __init__(self) -> None:
        self.is_full = False  # for copies on the GPU
        self.asked: deque[Callable[[], None]] = deque()  # kernels and copies that have not run
        # Launches, copies in and out, their bytes ("in bytes", "out bytes"), waits, and vectors that were made.
        self.counted: Counter[str] = Counter()
        # copied_in, copied_out: the host's side of every copy.
        self.copied_in: list[Float32s] = []
        self.copied_out: list[Float32s] = []
        # staged, locked: memory that was given out, or locked.
        self.staged: list[Float32s] = []
        self.locked: list[np.ndarray] = []
        self.while_copying_out: Callable[[], None] = lambda: None  # called in the middle of every copy from the GPU
        self.kernels = ModuleType("late kernels")
        self._using = threading.local()
        for kernel in (_update, _decay, _move, _accumulate):
            setattr(self.kernels, kernel.__name__[1:], partial(self._ask, kernel))
        self.kernels.is_finite = self._is_finite  # type: ignore[attr-defined]

    def use(self) -> None:
        self._using.here = True

    def full(self, elements: int, value: float) -> Vector:
        self.counted["vectors"] += 1
        return np.full(elements, value, np.float32).view(Vector)

    def bytes_in(self, host: np.ndarray) -> Vector:
        self.counted["vectors"] += 1
        return host.copy().view(Vector)

    def staging(self, elements: int) -> Float32s:
        self.staged.append(np.full(elements, np.nan, np.float32))
        return self.staged[-1]

    def lock_pages(self, host: np.ndarray) -> None:
        self.locked.append(host)

    def is_locked(self, host: Float32s) -> bool:
        return any(np.shares_memory(host, memory) for memory in self.locked)

    def copy_in(self, destination: Vector, host: Float32s) -> None:
        _check(destination, host)
        self.counted.update({"in": 1, "in bytes": host.nbytes} if host.size else {})
        self.copied_in.append(host)
        self.asked.append(lambda: np.copyto(destination, host))

    def copy_out(self, host: Float32s, source: Vector) -> None:
        _check(source, host)
        self.counted.update({"out": 1, "out bytes": host.nbytes} if host.size else {})
        self.copied_out.append(host)
        self.asked.append(partial(self._copy_out, host, source))

    def wait(self) -> None:
        self.counted["waits"] += 1
        while self.asked:
            self.asked.popleft()()

    def copied(self, vectors: Sequence[Vector]) -> list[Vector]:
        if self.is_full:
            raise QueueFull("no room")
        self.counted["kept"] += len(vectors)
        made = [np.full_like(vector, np.nan) for vector in vectors]
        self.asked.extend(partial(np.copyto, *pair) for pair in zip(made, vectors, strict=True))
        return made

    def fetch(self, pairs: Iterable[tuple[Float32s, Vector]]) -> None:
        while self.asked:  # its copies on the GPU may be among them
            self.asked.popleft()()
        for host, source in pairs:
            _check(source, host)
            self.counted["fetched"] += 1
            np.copyto(host, source)

    def _copy_out(self, host: Float32s, source: Vector) -> None:
        half = host.size // 2
        host[:half] = source[:half]
        self.while_copying_out()
        host[half:] = source[half:]

    def _is_finite(self, vector: Vector) -> bool:
        found: list[bool] = []
        self._ask(lambda vector: found.append(reference.is_finite(vector)), vector)
        self.wait()
        return found[0]

    def _ask(self, kernel: Callable[..., None], *given: Any, **more: Any) -> None:
        assert self._using.here, "a kernel was called in a thread that does not use the GPU"
        arrays = [argument for argument in given if isinstance(argument, np.ndarray)]
        assert all(isinstance(array, Vector) for array in arrays), "a kernel was called with memory of the host"
        self.counted["launches"] += 1
        self.asked.append(partial(kernel, *given, **more))


def kernels_on(ask: Callable[[Callable[[], None]], None], wait: Callable[[], None]) -> ModuleType:
    """Return the kernels for arrays that have their memory as `values`, such as those of `LateCuda`."""
    made = ModuleType("late kernels")

    def launch(kernel: Callable[..., Any], *given: Any, **more: Any) -> None:
        ask(partial(kernel, *_memory(given), **{name: _memory(value) for name, value in more.items()}))

    def is_finite(vector: Any) -> bool:
        found: list[bool] = []
        launch(lambda values: found.append(reference.is_finite(values)), vector)
        wait()
        return found[0]

    for kernel in (_update, _decay, _move, _accumulate):
        setattr(made, kernel.__name__[1:], partial(launch, kernel))
    made.is_finite = is_finite  # type: ignore[attr-defined]
    return made


def _memory(given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(_memory(one) for one in given)
    return given.values if isinstance(given, Array) else given


def _check(on_device: Vector, host: Float32s) -> None:
    assert isinstance(on_device, Vector)
    assert not isinstance(host, Vector)
    assert on_device.shape == host.shape
    assert on_device.flags.c_contiguous
    assert host.flags.c_contiguous


Where = tuple[Vector, int]


def _update(rule: str, values: Any, *vectors: Vector, where: Where | None = None) -> None:
    _there(partial(reference.update, rule, values), vectors, where)


def _decay(weights: Vector, share: float, *, where: Where | None = None) -> None:
    _there(lambda found: reference.decay(found, share), (weights,), where)


def _move(weights: Vector, pushed: Vector, state: str, pushes: int, *, where: Where) -> None:
    places = np.flatnonzero(where[0] == where[1])
    if state == COUNTER:
        places = (places[:, None] + np.arange(COUNTER_BYTES)).reshape(-1)
    found = np.asarray(weights[places])
    storage.move(found, np.asarray(pushed[places]), state, pushes)
    weights[places] = found


def _accumulate(total: Vector, gradient: Vector, *, first: bool) -> None:
    if first:
        np.add(gradient, np.float32(0.0), out=total)
    else:
        reference.accumulate(total, gradient)


def _there(call: Callable[..., None], vectors: tuple[Vector, ...], where: Where | None) -> None:
    """Call on vectors, or on what lies where it is meant."""
    if where is None:
        call(*vectors)
        return
    there = where[0] == where[1]
    found = [np.asarray(vector[there]) for vector in vectors]
    call(*found)
    for vector, moved in zip(vectors, found, strict=True):
        vector[there] = moved
