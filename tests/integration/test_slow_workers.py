"""A worker that is far slower than the others gets no parts of batches while these are there."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api import backends, fits
from parashard.api import trainer as module
from parashard.api.script import Script
from parashard.process.run_files import LOGS
from parashard_coordinator.core.controller import MEASURED

EXAMPLES, EPOCHS, SIZE, WORKERS = 60, 10, 12, 3
PARTS = EPOCHS * EXAMPLES // SIZE * WORKERS
SLOW, SLOW_S = "parashard-worker-2", 0.2


class Ledger:
    """Counts each example of each epoch; a step of worker-2 takes long."""

    adds_losses = True

    def __init__(self, steps: Counter[str]) -> None:
        self.steps = steps

    def for_thread(self) -> Ledger:
        """Return another one, which counts with this one."""
        return Ledger(self.steps)

    def initial_variables(self) -> Mapping[str, Any]:
        return {"counts": np.zeros(EXAMPLES, np.float32)}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        name = threading.current_thread().name
        self.steps[name] += 1
        time.sleep(SLOW_S if name == SLOW else 0.001)
        gradient = np.zeros(EXAMPLES, np.float32)
        gradient[batch.inputs[:, 0]] = -1.0
        return 0.5, {"counts": gradient}

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Mapping[str, float]:
        counts = variables["counts"]
        return {"loss": 0.0, "least": float(counts.min()), "most": float(counts.max())}


@pytest.fixture(autouse=True)
def no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where pytest is no script."""
    monkeypatch.chdir(tmp_path)
    for user in (module, fits, backends):
        monkeypatch.setattr(user, "SCRIPT", Script(None))


@pytest.mark.full("a real cluster; tests/coordinator/core/test_auto_jobs.py has the same in virtual time")
def test_a_slow_worker_is_left_out_and_every_example_counts_once() -> None:
    steps: Counter[str] = Counter()
    data = np.arange(EXAMPLES)[:, None], np.zeros(EXAMPLES, np.float32)
    strategy = ps.ParameterServerStrategy(2, WORKERS, "auto", workers_as="threads")
    trainer = ps.Trainer(Ledger(steps), ps.SGD(1.0), strategy)
    report = trainer.fit(data, epochs=EPOCHS, batch_size=SIZE, verbose=0).report
    assert (report["consistency"], report["steps_total"]) == (f"auto:{WORKERS}", PARTS)
    assert trainer.evaluate(data) == {"loss": 0.0, "least": EPOCHS, "most": EPOCHS}
    assert (
        "worker-2 gets no parts for 30 s: a part takes it"
        in (Path(report["run_dir"]) / LOGS / "coordinator.log").read_text()
    )
    assert steps[SLOW] <= MEASURED + 3, "some measure it, and it may hold one by then"
    assert all(found["drift"] == 0.0 for found in report["drifts"]), "its gradients are the same at any weights"
