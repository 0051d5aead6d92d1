"""A user's own model that gets into the troubles that alerts are about; `troubled.toml` names it.

Options of the job say which: `lag_steps` makes one worker fast and has every step of the others wait until the fast one
has done so many more; every `bad_every`th step cannot be computed; gradients are not finite once `folder` has a file
named NOT_FINITE; `idle_rows` more weights never have a gradient, which costs a worker little, and much a shard whose
optimizer moves them all the same. Counts steps, not time, so that a busy machine changes nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from parashard.data.base import Batch, DataSpec
from parashard.plan.variables import Variable

NOT_FINITE = "not-finite"
SHAPE = (64, 8)
POLL_S = 0.002
WAIT_S = 60.0  # if the fast worker is gone


class Troubled:
    """Gradients of zeros, and trouble."""

    def __init__(self, folder: Path, lag_steps: int, bad_every: int, idle_rows: int) -> None:
        self._not_finite = folder / NOT_FINITE
        self._done = folder / "fast-worker-steps"  # as many bytes as steps
        self._lag_steps = lag_steps
        self._bad_every = bad_every
        self._idle_rows = idle_rows
        self._fast: bool | None = None

    def initial_variables(self) -> dict[str, Variable]:
        shapes = {"weight": SHAPE} | ({"idle": (self._idle_rows, SHAPE[1])} if self._idle_rows else {})
        return {name: Variable(name, shape) for name, shape in shapes.items()}

    def loss_and_gradients(self, variables: Any, batch: Batch, xp: Any) -> tuple[float, dict[str, Any]]:
        if self._bad_every and batch.step % self._bad_every == 0:
            raise RuntimeError("this batch is poison")
        if self._lag_steps:
            self._keep_apart()
        gradient = np.full(SHAPE, np.nan if self._not_finite.exists() else 0.0, np.float32)
        return 1.0, {"weight": gradient, "idle": None} if self._idle_rows else {"weight": gradient}

    def evaluate(self, variables: Any, batch: Batch, xp: Any) -> dict[str, float]:
        return {"loss": 1.0}

    def _keep_apart(self) -> None:
        if self._fast is None:
            try:
                os.close(os.open(self._done, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                self._fast = False
            else:
                self._fast = True  # the first to come
        if self._fast:
            with self._done.open("ab") as file:
                file.write(b".")
            return
        until, end_s = self._steps() + self._lag_steps, time.monotonic() + WAIT_S
        while self._steps() < until and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def _steps(self) -> int:
        return self._done.stat().st_size


def build(spec: DataSpec, *, folder: str, lag_steps: int = 0, bad_every: int = 0, idle_rows: int = 0) -> Troubled:
    """Return the model that a job's options ask for."""
    return Troubled(Path(folder), lag_steps, bad_every, idle_rows)
