"""Models of the examples, in jobs that last as long as a test needs: a file says from which step on each takes long.

`long_job.py` puts it beside a job file. Apart from its steps' time a model is what it is in the example; but the ledger
has minus the gradient, since only the built-in one may learn upwards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parashard.data.base import Array, Batch, DataSpec
from parashard.job.model_options import RowLedgerOptions
from parashard.models.networks import MlpOptions, MultilayerPerceptron
from parashard.models.oracles import Ledger, RowLedger

QUICK_UNTIL = Path(__file__).with_name("quick-until")
SLOW_STEP_S = 1.0
POLL_S = 0.01


def take_time(step: int) -> None:
    """Return at once for the steps before the number in the file, for others after a while or when it has risen."""
    end_s = time.monotonic() + SLOW_STEP_S
    while step >= int(QUICK_UNTIL.read_text()) and time.monotonic() < end_s:
        time.sleep(POLL_S)


class LongLedger(Ledger):
    """The ledger, for a learning rate of 1."""

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Array]]:
        take_time(batch.step)
        loss, gradients = super().loss_and_gradients(variables, batch, xp)
        return loss, {name: -gradient for name, gradient in gradients.items()}


class LongRowLedger(RowLedger):
    """The ledger of rows, for learning rates of 1."""

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Array]]:
        take_time(batch.step)
        loss, gradients = super().loss_and_gradients(variables, batch, xp)
        return loss, {name: -gradient for name, gradient in gradients.items()}


class LongPerceptron(MultilayerPerceptron):
    """The multilayer perceptron."""

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array]]:
        take_time(batch.step)
        return super().loss_and_gradients(variables, batch, xp)


def ledger(spec: DataSpec) -> LongLedger:
    """Return the model of `ledger.toml`."""
    return LongLedger(spec)


def row_ledger(spec: DataSpec) -> LongRowLedger:
    """Return the model of `row_ledger.toml`."""
    return LongRowLedger(spec, RowLedgerOptions())


def mlp(spec: DataSpec, hidden: Sequence[int], **options: Any) -> LongPerceptron:
    """Return the model of `digits.toml`, in which nothing is drawn at random in a step."""
    return LongPerceptron(MlpOptions(hidden=tuple(hidden), **options), spec, seed=0)
