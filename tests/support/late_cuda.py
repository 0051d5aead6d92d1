"""A CuPy of a few lines over NumPy that counts what it is asked for, and whose streams run as late as they may.

Work on a stream is done when it must be: when the host waits for it, or another stream for an event behind it. Given a
random generator, it is done at any moment at which CUDA could do it, too. So what no event orders happens out of order.
Memory of the GPU is not zero at first, and page-locked memory that was dropped must not be read any more.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from parashard.process.cuda_code import OPTIONS
from parashard_worker.gpu_copies import LOOK, WEIGH
from parashard_worker.gpu_norms import SQUARES
from support.compiled_cupy import CompiledCupy

Place = tuple["Stream", int]
"""A stream after so many pieces of work."""
FORMS = ("arrays", "views", "run")
"""Forms of a model's gradients: an array for each, views of one run, or a `GradientRun` (as from PyTorch and JAX)."""
GARBAGE = 0xFF  # four of them are a NaN


class Stream:
    """Work in the order of its submission."""

    def __init__(self, cuda: LateCuda) -> None:
        self._cuda = cuda
        self._ahead: deque[Callable[[], None] | Place] = deque()
        self.asked = self.done = 0
        cuda.streams.append(self)

    def submit(self, work: Callable[[], None] | Place) -> None:
        with self._cuda.lock:
            self._ahead.append(work)
            self.asked += 1
            self._cuda.go_on()

    def use(self) -> None:
        """There is one that computes."""

    def __enter__(self) -> Stream:
        self._cuda.entered.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._cuda.entered.pop() is self

    def wait_event(self, event: Event) -> None:
        if event.place is not None:
            self.submit(event.place)

    def synchronize(self) -> None:
        self._cuda.count_wait()
        self.run_until(self.asked)

    def run_until(self, count: int) -> None:
        with self._cuda.lock:
            while self.done < count:
                self._cuda.go_on()
                if self.done < count:
                    self.step()

    def step(self) -> None:
        """Do the next piece of work, after what it waits for."""
        work = self._ahead[0]
        if isinstance(work, tuple):
            work[0].run_until(work[1])
        else:
            work()
        if self._ahead and self._ahead[0] is work:
            self._ahead.popleft()
            self.done += 1

    @property
    def may_go_on(self) -> bool:
        head = self._ahead[0] if self._ahead else None
        return head is not None and (not isinstance(head, tuple) or head[0].done >= head[1])


class Event:
    """A place in a stream."""

    def __init__(self, cuda: LateCuda) -> None:
        self._cuda = cuda
        self.place: Place | None = None

    def record(self, stream: Stream) -> None:
        self._cuda.counts["events"] += 1
        self.place = stream, stream.asked

    @property
    def done(self) -> bool:
        return self.place is None or self.place[0].done >= self.place[1]

    def synchronize(self) -> None:
        self._cuda.count_wait()
        if self._cuda.lost:
            raise self._cuda.cuda.runtime.CUDARuntimeError("cudaErrorAssert: device-side assert triggered")
        if self.place is not None:
            self.place[0].run_until(self.place[1])


class Pointer:
    """A place in memory of the GPU."""

    def __init__(self, memory: np.ndarray, offset: int) -> None:
        self.memory, self.offset = memory, offset
        self.ptr = memory.__array_interface__["data"][0] + offset

    def __add__(self, more: int) -> Pointer:
        return Pointer(self.memory, self.offset + more)


class Array:
    """Values in memory of the GPU: only its streams, and `LateCuda.value_of`, may look at them."""

    cuda: LateCuda

    def __init__(self, shape: Any, dtype: Any, memptr: Pointer) -> None:
        self.data = memptr
        self._hold(np.ndarray(shape, dtype, memptr.memory, memptr.offset))

    def _hold(self, values: np.ndarray) -> None:
        self.values, self.shape, self.dtype, self.ndim = values, values.shape, values.dtype, values.ndim

    def _view(self, values: np.ndarray) -> Array:
        view = object.__new__(type(self))
        offset = values.__array_interface__["data"][0] - self.data.ptr
        view.data = self.data + offset
        view._hold(values)
        return view

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def __float__(self) -> float:
        return float(self.get())

    def __getitem__(self, key: Any) -> Array:
        return self._view(self.values[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        into = self.values[key]
        self.cuda.ask(lambda: np.copyto(into, value.values, casting="unsafe"))

    def reshape(self, *shape: Any) -> Array:
        return self._view(self.values.reshape(*shape))

    def view(self, dtype: Any) -> Array:
        return self._view(self.values.view(dtype))

    def fill(self, value: float) -> None:
        self.cuda.ask(lambda: self.values.fill(value))

    def set(self, host: np.ndarray, stream: Stream) -> None:
        assert (host.shape, host.dtype) == (self.shape, self.dtype)
        self.cuda.count_copy("in", host.nbytes)
        read = self.cuda.reader(host)
        stream.submit(lambda: np.copyto(self.values, read()))

    def get(self, stream: Stream | None = None, out: np.ndarray | None = None, blocking: bool = True) -> np.ndarray:
        host = np.empty(self.shape, self.dtype) if out is None else out
        assert (host.shape, host.dtype) == (self.shape, self.dtype)
        self.cuda.count_copy("out", host.nbytes)
        used = stream or self.cuda.current
        used.submit(lambda: np.copyto(host, self.values))
        if blocking:
            used.synchronize()
        elif not self.cuda.is_pinned(host):
            used.run_until(used.asked)
        return host


class LateCuda:
    """What `parashard_worker.device` and `parashard.process.cuda` use of the module `cupy`.

    Attributes
    ----------
    counts : Counter
        "copies in" and "out" with their "bytes in" and "out", "kernels", "events" that were recorded, "events made",
        "allocations" of either side's memory, "waits" of the main thread and "waits elsewhere".
    refuses : bool
        No memory can be page-locked.
    lost : bool
        Whatever waits for an event learns that the context is lost.
    """

    __version__ = "0.late"

    def __init__(
        self, devices: int = 1, at_random: random.Random | None = None, compiled: CompiledCupy | None = None
    ) -> None:
        self._compiled = compiled
        self.counts: Counter[str] = Counter()
        self.streams: list[Stream] = []
        self.lock = threading.RLock()
        self.refuses = self.lost = False
        self._at_random = at_random
        self._pinned: dict[int, np.ndarray] = {}
        self._freed: set[int] = set()
        self._of_thread = threading.local()
        self.compute = Stream(self)
        self.ndarray = type("ndarray", (Array,), {"cuda": self})

        class CUDARuntimeError(RuntimeError):
            pass

        runtime = SimpleNamespace(
            getDeviceCount=lambda: devices,
            getDeviceProperties=lambda index: {"name": b"Late GPU"},
            runtimeGetVersion=lambda: 12080,
            hostRegister=lambda address, size_bytes, flags: None,
            hostUnregister=lambda address: None,
            CUDARuntimeError=CUDARuntimeError,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Device=lambda index: SimpleNamespace(use=lambda: None, mem_info=(1 << 30, 1 << 30)),
            Stream=self._stream,
            Event=self._event,
            get_current_stream=lambda: self.current,
            PinnedMemory=lambda size, flags: size,
            PinnedMemoryPointer=self._alloc,
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        )

    @property
    def entered(self) -> list[Stream]:
        """Streams that the calling thread has made its own, the newest last."""
        if not hasattr(self._of_thread, "entered"):
            self._of_thread.entered = []
        entered: list[Stream] = self._of_thread.entered
        return entered

    @property
    def current(self) -> Stream:
        return self.entered[-1] if self.entered else self.compute

    # --- what tests ask ---

    def computed(self, values: Any) -> Array:
        """Return what a kernel of the compute stream writes: an array, or what a function returns then."""
        like = values() if callable(values) else np.asarray(values)
        result = self.empty(like.shape, like.dtype)
        self.counts["allocations"] -= 1  # the model's
        self.ask(lambda: np.copyto(result.values, values() if callable(values) else like))
        return result

    def value_of(self, array: Array) -> np.ndarray:
        """Return an array's value as a kernel on the compute stream would see it."""
        self.compute.run_until(self.compute.asked)
        return array.values

    # --- what streams, events and arrays ask ---

    def go_on(self) -> None:
        """Do some of the work that may be done."""
        if self._at_random is None:
            return
        for _ in range(self._at_random.randrange(4)):
            ready = [stream for stream in self.streams if stream.may_go_on]
            if ready:
                self._at_random.choice(ready).step()

    def ask(self, kernel: Callable[[], None]) -> None:
        self.counts["kernels"] += 1
        self.current.submit(kernel)

    def count_wait(self) -> None:
        here = threading.current_thread() is threading.main_thread()
        self.counts["waits" if here else "waits elsewhere"] += 1

    def count_copy(self, way: str, size_bytes: int) -> None:
        self.counts[f"copies {way}"] += 1
        self.counts[f"bytes {way}"] += size_bytes

    def is_pinned(self, host: np.ndarray) -> bool:
        return self._block(host.__array_interface__["data"][0]) is not None

    def reader(self, host: np.ndarray) -> Callable[[], np.ndarray]:
        """Return what reads memory of the host by its address, and no reference, as the driver does."""
        address = host.__array_interface__["data"][0]
        found = self._block(address)
        if found is None:  # CUDA reads ordinary memory before the call returns
            kept = host.copy()
            return lambda: kept
        base, block = found
        run, shape, dtype = block[address - base : address - base + host.nbytes], host.shape, host.dtype

        def read() -> np.ndarray:
            assert base not in self._freed, "page-locked memory was dropped before it was copied"
            return run.view(dtype).reshape(shape)

        return read

    def _block(self, address: int) -> tuple[int, np.ndarray] | None:
        return next(((b, block) for b, block in list(self._pinned.items()) if b <= address < b + len(block)), None)

    def _alloc(self, size_bytes: int, offset: int) -> Any:
        if self.refuses:
            raise self.cuda.runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.counts["allocations"] += 1
        block = np.full(size_bytes, GARBAGE, np.uint8)
        self._pinned[block.__array_interface__["data"][0]] = block
        memory = (ctypes.c_uint8 * size_bytes).from_buffer(block.data)
        weakref.finalize(memory, self._freed.add, block.__array_interface__["data"][0])
        return memory

    def _stream(self, non_blocking: bool) -> Stream:
        assert non_blocking
        return Stream(self)

    def _event(self, disable_timing: bool) -> Event:
        assert disable_timing
        self.counts["events made"] += 1
        return Event(self)

    # --- the module ---

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_bytes=lambda: 0)

    def empty(self, shape: Any, dtype: Any) -> Array:
        self.counts["allocations"] += 1
        like = np.empty(shape, dtype)
        memory = np.full(max(1, like.nbytes), GARBAGE, np.uint8)
        return self.ndarray(like.shape, like.dtype, Pointer(memory, 0))

    def full(self, shape: Any, value: float, dtype: Any) -> Array:
        made = self.empty(shape, dtype)
        made.fill(value)
        return made

    def zeros(self, shape: Any, dtype: Any) -> Array:
        made = self.empty(shape, dtype)
        made.fill(0)
        return made

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        if isinstance(values, Array) and values.dtype == (dtype or values.dtype):
            return values
        given = values.values if isinstance(values, Array) else np.asarray(values)
        made = self.empty(given.shape, dtype or given.dtype)
        if isinstance(values, Array):
            self.ask(lambda: np.copyto(made.values, given, casting="unsafe"))
        else:
            self.count_copy("in", given.nbytes)
            made.values[...] = given
        return made

    def ElementwiseKernel(
        self,
        inputs: str,
        outputs: str,
        operation: str,
        name: str,
        *,
        no_return: bool,
        preamble: str = "",
        options: tuple[str, ...] = OPTIONS,
    ) -> Callable[..., None]:
        """Return what does in NumPy what a known operation does; of others the source is compiled."""
        assert no_return
        assert options == OPTIONS
        kernel: Callable[..., None] | None = KERNELS.get(operation)
        if kernel is None:
            assert self._compiled is not None, f"{name} needs `compiled`"
            kernel = self._compiled.ElementwiseKernel(
                inputs, outputs, operation, name, preamble=preamble, options=options, no_return=no_return
            )
        return lambda *given: self.ask(lambda: kernel(*(x.values if isinstance(x, Array) else x for x in given)))


def _look(kind: np.ndarray, value: np.ndarray, told: np.ndarray) -> None:
    if not np.isfinite(value[kind != 0]).all():
        told[1] = 1.0


def _weigh(kind: np.ndarray, weight: np.float32, value: np.ndarray) -> None:
    assert isinstance(weight, np.float32)
    value[kind == 2] *= weight


def _squares(run: np.ndarray, begins: np.ndarray, lengths: np.ndarray, squares: np.ndarray) -> None:
    for part, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        squares[part] = np.square(run[begin : begin + length], dtype=np.float64).sum()


KERNELS = {LOOK: _look, WEIGH: _weigh, SQUARES: _squares}
