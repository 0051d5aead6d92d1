"""Steps of a model by a worker's task on a device, as a session has them: on a real GPU, and on the CPU beside it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from parashard.data.base import Batch
from parashard.models.declaration import parts_of
from parashard.plan.flat import FlatLayout
from parashard_worker.computing import Task
from parashard_worker.device import Device
from parashard_worker.gpu_copies import wait_for_gradients
from support.in_process import plan_of

IN_FLIGHT = 2  # pushes whose gradients are waited for only after so many more steps
Step = tuple[float | None, dict[str, np.ndarray]]


def steps_of(
    model: Any, device: Device, data: tuple[np.ndarray, np.ndarray], *, steps: int = 5, clip_norm: float | None = None
) -> list[Step]:
    """Return losses and gradients of some steps, whose weights differ and are pulled into the same memory by turns."""
    parts = {name: parts_of(name, initial) for name, initial in model.initial_variables().items()}
    declared = {name: variable for name, (variable, _) in parts.items()}
    nothing = SimpleNamespace(steps_before=0)  # the batches are made here
    task = Task(model, nothing, nothing, plan_of(declared), device, clip_norm, None)  # type: ignore[arg-type]
    layout, (inputs, targets) = FlatLayout.of(declared), data
    pulled = [layout.over(device.host_memory(layout.elements)) for _ in range(2)]
    rows = len(targets) // steps
    found: list[tuple[float | None, Any]] = []
    for step in range(steps):
        values = pulled[step % 2]
        values.run[...] = 0
        for name, (variable, first) in parts.items():
            values[name][...] = np.reshape(first, variable.shape)
            if not variable.state:
                values[name][...] = values[name] * (1 + step / 4) + 0.01 * step
        here = device.arrived(values) if device.arrived is not None else values
        some = slice(rows * step, rows * (step + 1))
        loss, _, gradients = task.gradients(Batch(step, 0, np.arange(rows), inputs[some], targets[some]), here)
        assert gradients is not None
        found.append((loss, gradients))
        if step >= IN_FLIGHT:
            _wait(found, step - IN_FLIGHT)
    for step in range(max(0, steps - IN_FLIGHT), steps):
        _wait(found, step)
    return found


def _wait(found: list[tuple[float | None, Any]], step: int) -> None:
    loss, gradients = found[step]
    found[step] = loss, {name: np.array(gradient) for name, gradient in wait_for_gradients(gradients).items()}


def assert_alike(found: Sequence[Step], expected: Sequence[Step]) -> None:
    """Hold steps on a GPU against those on a CPU, whose sums have another order."""
    for (loss, gradients), (due_loss, due) in zip(found, expected, strict=True):
        np.testing.assert_allclose(loss, due_loss, rtol=1e-3)
        assert {name: g.dtype for name, g in gradients.items()} == dict.fromkeys(due, np.dtype(np.float32))
        for name, gradient in due.items():
            least = max(2e-3 * float(np.abs(gradient).max()), 1e-5)  # of sums that cancel only noise is left
            np.testing.assert_allclose(gradients[name], gradient, rtol=5e-3, atol=least, err_msg=name)
