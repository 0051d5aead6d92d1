"""Fits whose cluster is played: a script, a model, and runs that end as a test says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.api import backends, fits
from parashard.api import trainer as module
from parashard.api.script import Script
from parashard.job.load import as_toml
from parashard.launch.run import Outcome
from parashard.launch.run_folders import keep_origin
from parashard.launch.runs import Run
from parashard.models.declaration import write_declaration
from parashard.plan.variables import Variable
from parashard.store.arrays import write_arrays

X, Y = np.arange(12.0).reshape(6, 2), np.arange(6.0)


class Line:
    """A model with hand-written gradients."""

    def initial_variables(self) -> Mapping[str, Any]:
        return {"w": np.array([[1.0], [2.0]], np.float32), "b": Variable("b", (1,))}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        return Line.evaluate(self, variables, batch, xp)["loss"], {name: None for name in variables}

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Mapping[str, float]:
        outputs = batch.inputs @ variables["w"] + variables["b"]
        return {"loss": float(np.mean((outputs[:, 0] - batch.targets) ** 2)), "examples": len(batch.targets)}


class Runs:
    """Takes the place of `run_job`; `started_again` begins the script anew."""

    def __init__(self) -> None:
        self.jobs: list[Run] = []
        self.exit_code = 0
        self.accepted = True

    def __call__(self, run: Run, view: Any, **settings: Any) -> Outcome:
        run_dir = run.folder
        self.jobs.append(run)
        assert run.declared is not None
        write_declaration(run_dir, run.declared)
        keep_origin(run_dir, run.loaded)
        (run_dir / "job.toml").write_text(as_toml(run.job))
        write_arrays(
            run_dir / "weights.safetensors", {"w": np.full((2, 1), 3, np.float32), "b": np.ones(1, np.float32)}
        )
        report = {
            "training_loss": 0.25,
            "wall_s": 2.0,
            "steps_total": 6,
            "evaluations": [{"steps": 3, "loss": 0.5}, {"steps": 6, "loss": 0.4}],
        }
        if not self.exit_code:
            (run_dir / "report.json").write_text('{"state": "done"}')
        return Outcome(self.exit_code, report, "why", run_dir, self.accepted)

    def started_again(self, exit_code: int = 0) -> None:
        """Let the script begin once more, and its runs end like that."""
        self.exit_code, module.SCRIPT._calls, module.SCRIPT.results = exit_code, 0, []
        module.SCRIPT._sources = None


@pytest.fixture(name="runs")
def played_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    """Play the clusters of the script train.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    script = Script(None)
    script._file = str(tmp_path / "train.py")
    for user in (module, fits, backends):
        monkeypatch.setattr(user, "SCRIPT", script)
    monkeypatch.setattr(backends, "run_job", runs)
    return runs
