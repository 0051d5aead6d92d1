"""What Python on the host adds to a step on a GPU, seen without one: `python -m benchmarks.gpu.host_cost`.

Trains the ResNet at width 1 by `OneDeviceStrategy("cuda:0")` on a CuPy that is NumPy and does at once what it is asked
for, so that nearly all that a step takes is what it asks for, beside PyTorch's forward and backward alone. On a GPU the
time between the wait for a step's results and the next step's first kernel is time in which the GPU has nothing to do;
what comes after the launches is hidden while it computes. Microseconds: the least of many steps, the tenth, the median.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import chdir
from itertools import pairwise
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

WARM_STEPS = 20  # of a fit
EPOCHS = 3
Marks = list[tuple[str, int]]


def _nothing(*given: Any, **named: Any) -> None:
    """Do nothing."""


class Pointer:
    """A place in memory."""

    def __init__(self, memory: np.ndarray, offset: int) -> None:
        self._memory, self.offset = memory, offset

    @property
    def ptr(self) -> int:
        """Its address."""
        return int(self._memory.__array_interface__["data"][0]) + self.offset

    def __add__(self, more: int) -> Pointer:
        return Pointer(self._memory, self.offset + more)


class Array(np.ndarray):
    """An array of the GPU."""

    def __new__(cls, shape: Any, dtype: Any, memory: Any) -> Array:
        """Return one in memory of another."""
        return np.ndarray.__new__(cls, shape, dtype, memory._memory.view(np.ndarray), memory.offset)

    @property
    def data(self) -> Any:
        """Where it begins."""
        return Pointer(self, 0)

    def set(self, host: np.ndarray, stream: Any = None) -> None:
        """Copy from the host."""
        np.ndarray.__setitem__(self, ..., host)

    def get(self, stream: Any = None, out: Any = None, blocking: bool = True) -> np.ndarray:
        """Copy to the host."""
        if out is None:
            return np.array(self)
        out[...] = self
        return np.asarray(out)


class Immediate(ModuleType):
    """The part of CuPy that parashard uses; `waited` is called at each wait for an event."""

    __version__ = "0.immediate"
    ndarray = Array

    def __init__(self, waited: Callable[[], None]) -> None:
        super().__init__("cupy")
        device = SimpleNamespace(use=_nothing, mem_info=(0, 1))
        stream = SimpleNamespace(use=_nothing, wait_event=_nothing, synchronize=_nothing, ptr=0)
        event = SimpleNamespace(record=_nothing, synchronize=waited, done=True)
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDeviceCount=lambda: 1,
                getDeviceProperties=lambda index: {"name": b"none"},
                runtimeGetVersion=lambda: 0,
                hostRegister=_nothing,
                hostUnregister=_nothing,
                CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
            ),
            Device=lambda index: device,
            Stream=lambda non_blocking: stream,
            Event=lambda disable_timing: event,
            get_current_stream=lambda: stream,
            PinnedMemory=lambda size, flags: size,
            PinnedMemoryPointer=lambda size, offset: bytearray(size),
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def from_dlpack(self, tensor: Any) -> Any:
        """Return an array of a tensor's memory."""
        return np.from_dlpack(tensor).view(Array)

    def asarray(self, values: Any, dtype: Any = None) -> Any:
        """Return an array of the GPU."""
        return np.asarray(values, dtype).view(Array)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return an array of the GPU."""
        return np.empty(shape, dtype).view(Array)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return an array of the GPU."""
        return np.zeros(shape, dtype).view(Array)

    def full(self, shape: Any, value: float, dtype: Any) -> Any:
        """Return an array of the GPU."""
        return np.full(shape, value, dtype).view(Array)

    def get_default_memory_pool(self) -> Any:
        """Return one without memory: checkpoints are not copied on the GPU."""
        return SimpleNamespace(free_bytes=lambda: 0)

    def ElementwiseKernel(self, *words: Any, **options: Any) -> Callable[..., None]:
        """Return a kernel that does nothing: the gradients are finite, and weigh 1."""
        return _nothing


def kernels() -> ModuleType:
    """Return update rules: of momentum; the others, of state, do nothing."""
    made: Any = ModuleType("immediate kernels")

    def update(rule: str, values: Any, weights: Any, gradient: Any, momentum: Any, where: Any = None) -> None:
        momentum *= np.float32(0.9)
        momentum += gradient
        weights -= np.float32(0.01) * momentum

    made.update = update
    made.decay = made.move = made.accumulate = _nothing
    made.is_finite = lambda vector: True
    return made  # type: ignore[no-any-return]


def plain(data: tuple[np.ndarray, np.ndarray], batch: int, steps: int) -> list[int]:
    """Return how long forward and backward take, in ns."""
    import torch

    from benchmarks.gpu import resnet

    net, found = resnet.net(1), []
    parameters, x, y = list(net.parameters()), torch.from_numpy(data[0][:batch]), torch.from_numpy(data[1][:batch])
    for _ in range(steps):
        began = time.perf_counter_ns()
        torch.autograd.grad(resnet.loss(net(x), y), parameters)
        found.append(time.perf_counter_ns() - began)
    return found[WARM_STEPS:]


def ours(data: tuple[np.ndarray, np.ndarray], batch: int, marks: Marks) -> list[dict[str, int]]:
    """Train, and return the time at which each step reached each mark, in ns."""
    import parashard as ps
    from benchmarks.gpu import resnet

    net = resnet.net(1)
    net.register_forward_pre_hook(lambda module, inputs: marks.append(("forward", time.perf_counter_ns())))
    model = ps.torch.Model(net, resnet.loss)
    given = model.loss_and_gradients

    def marked(*step: Any) -> Any:
        marks.append(("model", time.perf_counter_ns()))
        result = given(*step)
        marks.append(("returned", time.perf_counter_ns()))
        return result

    model.loss_and_gradients = marked  # type: ignore[method-assign]
    settings = {"checkpoint.every_s": 0.0}
    trainer = ps.Trainer(model, ps.Momentum(0.01), ps.OneDeviceStrategy("cuda:0"), settings=settings)
    marks.clear()
    trainer.fit(data, epochs=EPOCHS, batch_size=batch, verbose=0)
    steps: list[dict[str, int]] = []
    for what, at in marks:
        if what == "model":
            steps.append({})
        if steps:
            steps[-1].setdefault(what, at)
    return steps[WARM_STEPS:]


def main() -> None:
    """Measure in turns, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="steps of an epoch; a fit has three epochs")
    parser.add_argument("--batch", type=int, default=2)
    asked = parser.parse_args()
    marks: Marks = []
    sys.modules["cupy"] = Immediate(lambda: marks.append(("wait", time.perf_counter_ns())))
    import torch

    from benchmarks.gpu import resnet
    from parashard_server.state.cuda_device import CudaDevice

    torch.set_num_threads(1)
    CudaDevice.kernels = kernels()
    data = resnet.data(asked.steps * asked.batch, None)
    spans: dict[str, list[int]] = defaultdict(list)
    for _ in range(asked.rounds):
        spans["plain"] += plain(data, asked.batch, asked.steps)
        for step, following in pairwise(ours(data, asked.batch, marks)):
            spans["step"].append(following["model"] - step["model"])
            spans["wait to forward"].append(following["forward"] - step["wait"])
            spans["forward to returned"].append(step["returned"] - step["forward"])
            spans["returned to wait"].append(step["wait"] - step["returned"])
    print(
        json.dumps({name: [round(q / 1e3) for q in np.quantile(some, [0, 0.1, 0.5])] for name, some in spans.items()})
    )


if __name__ == "__main__":
    with TemporaryDirectory() as folder, chdir(folder):
        main()
