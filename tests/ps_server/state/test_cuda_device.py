"""CudaDevice: what it asks of CuPy, in which order. What CuPy makes of it takes a GPU: see test_cuda_kernels.py."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parashard.errors import ConfigurationError, QueueFull, Unavailable
from parashard_server.state.cuda_device import CudaDevice, open_device


class Recorded:
    """A CuPy that writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.registers = True
        self.room_elements = 100
        self.free, self.pooled = 500, 0  # bytes
        self.names = iter(["stream", "other stream"] * 2)
        runtime = SimpleNamespace(
            getDeviceCount=lambda: 2,
            getDeviceProperties=lambda index: {"name": b"Recorded GPU"},
            hostRegister=self._register,
            hostUnregister=lambda address: self.asked.append("unregister"),
            CUDARuntimeError=OSError,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Device=self._device,
            Stream=lambda non_blocking: self._stream(next(self.names)),
            Event=lambda disable_timing: SimpleNamespace(record=lambda stream: self.asked.append("record")),
            get_current_stream=lambda: self._stream("current stream"),
            PinnedMemory=lambda size_bytes, flags: bytearray(size_bytes),
            PinnedMemoryPointer=lambda memory, offset: memory,
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        )

    def _device(self, index: int) -> Any:
        return SimpleNamespace(use=lambda: self.asked.append(f"device {index}"), mem_info=(self.free, 1000))

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_bytes=lambda: self.pooled)

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            use=lambda: self.asked.append(name),
            synchronize=lambda: self.asked.append("synchronize"),
            wait_event=lambda event: self.asked.append("wait for event"),
        )

    def full(self, elements: int, value: float, dtype: Any) -> Vector:
        self.asked.append("full")
        if elements > self.room_elements:
            raise MemoryError("Out of memory allocating 404 bytes")
        return Vector(np.full(elements, value, dtype), self.asked)

    def empty(self, elements: int, dtype: Any) -> Vector:
        return self.full(elements, np.nan, dtype)

    def _register(self, address: int, size_bytes: int, flags: int) -> None:
        self.asked.append(f"register {size_bytes}")
        if not self.registers:
            raise OSError("cudaErrorHostMemoryAlreadyRegistered")


class Vector:
    """On the GPU."""

    def __init__(self, values: np.ndarray, asked: list[str]) -> None:
        self.values, self._asked = values, asked

    def set(self, host: np.ndarray, stream: Any) -> None:
        self._asked.append("set")
        self.values[:] = host

    def get(self, stream: Any, out: np.ndarray, blocking: bool) -> None:
        assert not blocking
        self._asked.append(f"get by {stream.name}")
        if np.isnan(self.values).any():
            raise OSError("cudaErrorIllegalAddress")
        out[:] = self.values

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def __setitem__(self, key: Any, value: Vector) -> None:
        self._asked.append("copy")
        self.values[key] = value.values


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    cupy = Recorded()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


def test_a_shard_takes_the_gpu_that_it_is_told_or_one_in_turn(cupy: Recorded) -> None:
    assert [device.name for device in (open_device("cuda:0", 1), open_device("cuda", 3)) if device] == [
        "cuda:0 Recorded GPU",
        "cuda:1 Recorded GPU",
    ]
    assert open_device("cpu", 0) is None
    with pytest.raises(ConfigurationError, match="'auto' is unknown; allowed: cpu, cuda, cuda:N"):
        open_device("auto", 0)


def test_a_gpu_that_is_too_small_is_reported(cupy: Recorded) -> None:
    with pytest.raises(ConfigurationError, match=r"cuda:1 Recorded GPU has no room for 404 bytes of this shard"):
        CudaDevice(1).full(101, 0.0)


def test_copies_go_by_the_shards_stream_and_are_waited_for_together(cupy: Recorded) -> None:
    device = CudaDevice(1)
    vector = device.full(3, 0.0)
    cupy.asked.clear()
    device.copy_in(vector, np.arange(3, dtype=np.float32))
    host = np.zeros(3, np.float32)
    device.copy_out(host, vector)
    device.wait()
    used = ["device 1", "stream"]
    assert cupy.asked == [*used, "set", *used, "get by stream", "synchronize"]
    assert host.tolist() == [0.0, 1.0, 2.0]


def test_what_is_copied_on_the_gpu_is_fetched_by_a_stream_of_its_own(cupy: Recorded) -> None:
    device = CudaDevice(0)
    vector, nothing = device.full(3, 2.0), device.full(0, 0.0)
    cupy.asked.clear()
    (kept, none), host = device.copied([vector, nothing]), np.zeros(3, np.float32)
    assert cupy.asked == ["device 0", "stream", "full", "full", "copy", "copy", "record"]
    cupy.asked.clear()
    device.fetch([(host, kept), (np.empty(0, np.float32), none)])
    assert cupy.asked == ["device 0", "wait for event", "get by other stream", "synchronize"]
    assert host.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(("free", "pooled", "fits"), [(112, 0, True), (111, 0, False), (0, 112, True), (0, 111, False)])
def test_copies_on_a_gpu_leave_a_tenth_of_its_memory(cupy: Recorded, free: int, pooled: int, fits: bool) -> None:
    cupy.free, cupy.pooled = free, pooled
    device = CudaDevice(0)
    vector = device.full(3, 0.0)
    if fits:
        device.copied([vector])
        return
    with pytest.raises(QueueFull, match="cuda:0 Recorded GPU has 111 bytes free, and its checkpoint would take 12"):
        device.copied([vector])


def test_without_the_room_that_a_gpu_has_told_nothing_is_copied(cupy: Recorded) -> None:
    device = CudaDevice(0)
    vector = device.full(3, 0.0)
    cupy.room_elements = 2
    with pytest.raises(QueueFull, match="cuda:0 Recorded GPU has no room for a checkpoint of 12 bytes"):
        device.copied([vector])


def test_a_gpu_that_fails_while_it_is_copied_from_is_reported(cupy: Recorded) -> None:
    device = CudaDevice(0)
    with pytest.raises(Unavailable, match="cuda:0 Recorded GPU failed while a checkpoint was copied from it: cudaErr"):
        device.fetch([(np.zeros(3, np.float32), device.full(3, np.nan))])


def test_beside_a_model_of_this_process_the_stream_is_the_models(cupy: Recorded) -> None:
    CudaDevice(0, own_stream=False).use()
    assert cupy.asked[-2:] == ["device 0", "current stream"]


def test_nothing_is_copied_of_nothing(cupy: Recorded) -> None:
    device = CudaDevice(0)
    empty, vector = np.empty(0, np.float32), device.full(0, 0.0)
    cupy.asked.clear()
    device.copy_in(vector, empty)
    device.copy_out(empty, vector)
    device.lock_pages(empty)
    assert cupy.asked == []


def test_pages_are_locked_as_long_as_the_memory_is_there(cupy: Recorded) -> None:
    host, device = np.zeros(5, np.float32), CudaDevice(0)
    device.lock_pages(host)
    assert cupy.asked[-1] == "register 20"
    assert device.is_locked(host)
    assert device.is_locked(host[1:3])
    assert not device.is_locked(np.zeros(5, np.float32))
    view = host[1:3]
    del host
    gc.collect()
    assert device.is_locked(view)
    del view
    gc.collect()
    assert cupy.asked[-1] == "unregister"
    assert not device._locked


def test_memory_that_cannot_be_locked_is_used_as_it_is(cupy: Recorded) -> None:
    cupy.registers = False
    host = np.zeros(5, np.float32)
    device = CudaDevice(0)
    device.lock_pages(host)
    assert not device.is_locked(host)
    del host
    gc.collect()
    assert cupy.asked[-1] == "register 20"


def test_gradients_are_staged_in_memory_of_their_length(cupy: Recorded) -> None:
    staging = CudaDevice(0).staging(7)
    assert (staging.shape, staging.dtype, staging.flags.writeable) == ((7,), np.float32, True)
