"""The CUDA kernels, and the storages of both kinds, as tests call them: with vectors of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parashard_server.state.cuda_storage import CudaStorage
from parashard_server.state.kernels import cuda
from parashard_server.state.storage import Storage


def received(storage: Storage, gradient: np.ndarray) -> Any:
    """Return a gradient, in the shard's layout, where a storage computes."""
    return storage.received(gradient) if isinstance(storage, CudaStorage) else gradient


class Hosted:
    """CUDA kernels with the host's vectors as arguments: copied to the GPU, and back after every call."""

    def __init__(self, to_device: Callable[[np.ndarray], Any], to_host: Callable[[Any], np.ndarray]) -> None:
        self.to_device, self.to_host = to_device, to_host

    def update(self, rule: str, values: Any, *vectors: np.ndarray) -> None:
        on_device = [self.to_device(vector) for vector in vectors]
        cuda.update(rule, values, *on_device)
        for vector, moved in zip(vectors, on_device, strict=True):
            vector[:] = self.to_host(moved)
