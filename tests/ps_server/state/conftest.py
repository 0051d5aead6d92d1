"""The sources of the CUDA kernels, compiled for this CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from parashard_server.state.kernels import cuda
from support.compiled_cupy import CompiledCupy, Resident
from support.hosted_cuda import Hosted


@pytest.fixture
def on_this_cpu(compiled_cupy: CompiledCupy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosted]:
    monkeypatch.setitem(sys.modules, "cupy", compiled_cupy)
    cuda._compiled.cache_clear()
    yield Hosted(lambda vector: vector.copy().view(Resident), Resident.get)
    cuda._compiled.cache_clear()


@pytest.fixture
def on_a_device(xp_gpu: Any) -> Hosted:
    return Hosted(xp_gpu.asarray, xp_gpu.asnumpy)
