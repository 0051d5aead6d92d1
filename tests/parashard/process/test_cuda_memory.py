"""What is told of a GPU's memory: how much is used, and by which libraries; and how often the driver is asked."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from parashard.process.cuda_memory import ASKED_EVERY_S, DeviceMemory, index_in, memory_in_words

GIB = 2**30


class Card:
    """A GPU as CuPy has it, which counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.free, self.total = 0, 80 * GIB
        self.pooled = 3 * GIB

    def device(self, index: int) -> Any:
        assert index == 1
        card = self

        class Device(nullcontext[None]):
            @property
            def mem_info(self) -> tuple[int, int]:
                card.asked += 1
                if card.total < 0:
                    raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")
                return card.free, card.total

        return Device()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Return the second GPU of this process, in which no framework is loaded."""
    card = Card()
    pool = SimpleNamespace(total_bytes=lambda: card.pooled)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=card.device), get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name in ("torch", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return card


@pytest.mark.parametrize(("device", "index"), [("cuda:1 NVIDIA L4", 1), ("cuda:0", 0), ("cpu", None), ("", None)])
def test_a_devices_name_has_the_number_of_its_gpu(device: str, index: int | None) -> None:
    assert index_in(device) == index


def test_the_driver_is_asked_once_a_second(card: Card) -> None:
    now_s = [100.0]
    memory = DeviceMemory(1, lambda: now_s[0])
    card.free = 30 * GIB
    assert [memory.read() for _ in range(3)] == [(50 * GIB, 80 * GIB)] * 3
    card.free = 20 * GIB
    now_s[0] += ASKED_EVERY_S - 0.01
    assert (memory.read(), card.asked) == ((50 * GIB, 80 * GIB), 1)
    now_s[0] += 0.01
    assert (memory.read(), card.asked) == ((60 * GIB, 80 * GIB), 2)


def test_a_gpu_that_does_not_answer_has_no_figures(card: Card) -> None:
    card.total = -1
    assert DeviceMemory(1).read() is None
    assert memory_in_words("cuda:1 any") == ""


def test_who_has_the_memory_is_told_as_far_as_it_is_known(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.free = GIB // 4
    assert memory_in_words("cuda:1 any") == "0.2 of 80.0 GiB are free; in this process CuPy has 3.0"
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, memory_reserved=lambda index: 60 * GIB))
    monkeypatch.setitem(sys.modules, "torch", torch)
    bridge = SimpleNamespace(backends_are_initialized=lambda: True)
    figures = {"bytes_in_use": GIB, "pool_bytes": 2 * GIB}
    devices = [None, SimpleNamespace(memory_stats=lambda: figures)]
    jax = SimpleNamespace(_src=SimpleNamespace(xla_bridge=bridge), local_devices=lambda backend: devices)
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert memory_in_words("cuda:1 any") == (
        "0.2 of 80.0 GiB are free; in this process PyTorch has 60.0, JAX has 2.0, CuPy has 3.0"
    )
    bridge.backends_are_initialized = lambda: False
    torch.cuda.is_initialized = lambda: False
    card.pooled = 0
    assert memory_in_words("cuda:1 any") == "0.2 of 80.0 GiB are free"


@pytest.mark.parametrize("device", ["cpu", "cuda:1 any"])
def test_without_cupy_there_is_nothing_to_tell(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert memory_in_words(device) == ""
