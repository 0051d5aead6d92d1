"""Training in this process on one GPU: nothing but batches and losses crosses, and the bits are those of the host."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api import fits
from parashard.api import trainer as module
from parashard.api.script import Script
from parashard.api.strategies import InProcessStrategy
from parashard.errors import JobFailed
from parashard.plan.flat import FlatArrays, GradientRun
from parashard.plan.variables import Initializer, Variable
from parashard.store.arrays import read_arrays
from parashard_server.state.cuda_device import CudaDevice
from support.late_cuda import FORMS, LateCuda
from support.late_device import kernels_on
from support.line_model import Line, X, Y


class Wide(Line):
    """A line, and a frozen variable; for each layer a weight, a bias that does not decay, an average and a counter."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = layers
        self.spoiled: int | None = None  # the step whose gradient is not finite
        self.has_unused = False  # each fifth step has no gradient of a bias

    def initial_variables(self) -> Mapping[str, Any]:
        found = dict(super().initial_variables())
        found["a.still"] = Variable("a.still", (2, 2), Initializer("constant", 0.5), frozen=True)
        for layer in range(self.layers):
            found |= {
                f"{layer:02}.bias": Variable(f"{layer:02}.bias", (3,), decay=False),
                f"{layer:02}.mean": Variable(f"{layer:02}.mean", (5,), state="average:0.25"),
                f"{layer:02}.steps": Variable(f"{layer:02}.steps", (1, 8), state="counter"),
                f"{layer:02}.weight": np.full((70,), 1.0 + layer, np.float32),
            }
        return found

    def is_unused(self, name: str, batch: Any) -> bool:
        return self.has_unused and name.endswith(".bias") and batch.step % 5 == 4

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        loss, gradients = super().loss_and_gradients(variables, batch, xp)
        for name, values in variables.items():
            _, _, kind = name.partition(".")
            if self.is_unused(name, batch):
                gradients[name] = None
            elif kind in ("bias", "weight", "still"):
                gradients[name] = np.float32(0.5 + batch.step % 3) * (values + np.float32(loss))
            elif kind == "mean":
                gradients[name] = np.full(values.shape, loss, np.float32)
            elif kind == "steps":
                gradients[name] = np.full(values.shape, 200, np.float32)
        if batch.step == self.spoiled:
            gradients["w"] = gradients["w"] * np.float32(np.inf)
        return loss, gradients


class OnGpu(Wide):
    """The same, whose arithmetic a kernel does late, and whose gradients have one of three FORMS."""

    form = "views"

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        self.before(batch)
        if not isinstance(variables, FlatArrays):
            raise AssertionError("the variables lie in a run")
        found: dict[str, Any] = {}

        def compute() -> np.ndarray:
            there = {name: array.values for name, array in variables.items()}
            seen = replace(batch, inputs=batch.inputs.values, targets=batch.targets.values)
            before, self.before = self.before, lambda batch: None
            with np.errstate(all="ignore"):
                found["loss"], found["gradients"] = Wide.loss_and_gradients(self, there, seen, np)
            self.before = before
            run = np.zeros(variables.layout.elements, np.float32)
            for name, gradient in found["gradients"].items():
                if gradient is not None:
                    run[variables.layout.places[name][0]] = gradient.reshape(-1)
            return run

        run = xp.computed(compute)
        loss = xp.computed(lambda: np.float64(found["loss"]))
        due = self.initial_variables()
        unused = {name for name in due if self.is_unused(name, batch)}
        if self.form == "run":
            trained = {name for name in due if not name.endswith(".still")}
            return loss, GradientRun(variables.layout, run, trained - unused, trained)
        gradients = {name: run[place].reshape(shape) for name, (place, shape) in variables.layout.places.items()}
        gradients |= dict.fromkeys(unused)
        return loss, FlatArrays(variables.layout, run, gradients) if self.form == "views" else gradients

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Mapping[str, float]:
        there = {name: xp.value_of(array) for name, array in variables.items()}
        seen = replace(batch, inputs=xp.value_of(batch.inputs), targets=xp.value_of(batch.targets))
        return super().evaluate(there, seen, np)


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No script: pytest is none, as a notebook."""
    monkeypatch.chdir(tmp_path)
    for user in (module, fits):
        monkeypatch.setattr(user, "SCRIPT", Script(None))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    late = LateCuda()
    monkeypatch.setitem(sys.modules, "cupy", late)
    monkeypatch.setattr(CudaDevice, "kernels", kernels_on(late.ask, late.compute.synchronize))
    return late


def fit(model: Wide, strategy: InProcessStrategy, optimizer: Any = None, **arguments: Any) -> ps.History:
    of_trainer = {name: arguments.pop(name) for name in ("clip_norm", "schedule", "settings") if name in arguments}
    trainer = ps.Trainer(model, optimizer or ps.Adam(0.05), strategy, seed=3, **of_trainer)
    return trainer.fit((X, Y), **{"epochs": 4, "batch_size": 8, "verbose": 0, **arguments})


def digest(history: ps.History) -> str:
    return str(history.report["weights_sha256"])


STRATEGIES: dict[str, Callable[[str], InProcessStrategy]] = {
    "one device": ps.OneDeviceStrategy,
    "mirrored": lambda device: ps.MirroredStrategy([device] * 3),
    "central storage": lambda device: ps.CentralStorageStrategy([device] * 2),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_bits_are_those_of_the_host(cupy: LateCuda, name: str, form: str) -> None:
    strategy = STRATEGIES[name]
    model = OnGpu(2)
    model.form = form
    optimizer = ps.AdamW(0.05, weight_decay=0.1)
    plain = Wide(2)
    model.has_unused = plain.has_unused = True
    there = fit(model, strategy("cuda:0"), optimizer, validation_data=(X, Y))
    here = fit(plain, strategy("cpu"), optimizer, validation_data=(X, Y))
    assert there.history == here.history
    assert digest(there) == digest(here)


@pytest.mark.parametrize("layers", [1, 12])
def test_a_clipped_gradient_stays_there(cupy: LateCuda, layers: int) -> None:
    counts: list[Counter[str]] = []
    model = OnGpu(layers)
    model.before = lambda batch: counts.append(cupy.counts.copy())
    fit(model, ps.OneDeviceStrategy("cuda:0"), clip_norm=0.5)
    for step in [after - before for before, after in pairwise(counts[6:])]:
        assert (step["copies in"], step["copies out"]) == (1, 2), "a batch, a loss, and sums of squares"
        assert step["bytes out"] < 16 + 32 * (layers + 2)
        assert (step["waits"], step["allocations"]) == (1, 0)


@pytest.mark.parametrize("form", ["views", "run"])
@pytest.mark.parametrize("layers", [1, 12])
@pytest.mark.parametrize("name", STRATEGIES)
def test_of_a_step_a_batch_goes_in_and_a_loss_comes_out(cupy: LateCuda, name: str, layers: int, form: str) -> None:
    counts: list[Counter[str]] = []
    model = OnGpu(layers)
    model.form, model.has_unused = form, form == "run"
    model.before = lambda batch: counts.append(cupy.counts.copy())
    fit(model, STRATEGIES[name]("cuda:0"))
    assert len(counts) == 48
    later = [after - before for before, after in pairwise(counts[6:])]
    for step in later:
        assert (step["copies in"], step["copies out"], step["bytes out"]) == (1, 1, 16)
        assert step["waits"] == 1
        assert step["allocations"] == step["events made"] == 0
    assert max(step["kernels"] for step in later) <= 14  # of the model 2; whatever the number of variables


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_next_batch_goes_in_before_a_step_s_loss_is_waited_for(
    cupy: LateCuda, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    count_wait, model = cupy.count_wait, OnGpu()
    model.before = lambda batch: seen.append(("model", cupy.counts["copies in"]))
    monkeypatch.setattr(cupy, "count_wait", lambda: (seen.append(("wait", cupy.counts["copies in"])), count_wait()))
    fit(model, STRATEGIES[name]("cuda:0"))
    copied = [later - before for (what, before), (then, later) in pairwise(seen) if (what, then) == ("model", "wait")]
    assert copied[1:] == [int((step + 1) % 12 != 0) for step in range(1, 48)], "callbacks come between two epochs"


def test_what_a_callback_changes_after_an_epoch_is_in_all_of_the_next(cupy: LateCuda) -> None:
    x, seen, model = np.zeros_like(X), [], OnGpu()

    class Changing(ps.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            x[:] = epoch + 1

    model.before = lambda batch: seen.append(float(batch.on_host.inputs.mean()))
    trainer = ps.Trainer(model, ps.Adam(0.05), ps.OneDeviceStrategy("cuda:0"), seed=3)
    trainer.fit((x, Y), epochs=3, batch_size=8, verbose=0, callbacks=[Changing()])
    assert seen == [0.0] * 12 + [1.0] * 12 + [2.0] * 12


@pytest.mark.parametrize("settings", [{"clip_norm": 0.5}, {"schedule": {"kind": "cosine"}}])
def test_what_is_clipped_or_scheduled_has_the_bits_of_the_host(cupy: LateCuda, settings: dict[str, Any]) -> None:
    there, here = (
        fit(model, ps.MirroredStrategy([device] * 2), **settings)
        for model, device in ((OnGpu(), "cuda:0"), (Wide(), "cpu"))
    )
    assert digest(there) == digest(here)


def test_the_best_weights_are_kept_from_the_gpu(cupy: LateCuda) -> None:
    found = []
    for model, device in ((OnGpu(), "cuda:0"), (Wide(), "cpu")):
        stop = ps.callbacks.EarlyStopping(monitor="val_loss", patience=1, mode="max", restore_best_weights=True)
        history = fit(model, ps.OneDeviceStrategy(device), validation_data=(X, Y), callbacks=[stop])
        found.append((history.history, read_arrays(history.run_dir / "weights.safetensors")))
    (history, there), (expected, here) = found
    assert history == expected
    assert {name: values.tobytes() for name, values in there.items()} == {n: v.tobytes() for n, v in here.items()}


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_told(cupy: LateCuda, form: str) -> None:  # P6
    told = []
    for model, device in ((OnGpu(), "cuda:0"), (Wide(), "cpu")):
        if isinstance(model, OnGpu):
            model.form = form
        model.spoiled = 21
        with pytest.raises(JobFailed) as failed, np.errstate(all="ignore"):
            fit(model, ps.MirroredStrategy([device] * 2))
        told.append(str(failed.value))
    assert told[0] == told[1]
    assert "step 21" in told[0]


@pytest.mark.parametrize("step", [0, 21])
def test_after_ctrl_c_a_resumed_run_has_the_digest_of_a_quiet_one(cupy: LateCuda, step: int) -> None:
    quiet = fit(OnGpu(), ps.MirroredStrategy(["cuda:0"] * 4))
    model = OnGpu()
    model.before = lambda batch: os.kill(os.getpid(), signal.SIGINT) if batch.step == step else None
    with pytest.raises(KeyboardInterrupt):
        fit(model, ps.MirroredStrategy(["cuda:0"] * 4))
    assert digest(fit(OnGpu(), ps.MirroredStrategy(["cuda:0"] * 4), resume=True)) == digest(quiet)


def test_checkpoints_beside_the_training_change_nothing(cupy: LateCuda) -> None:
    quiet = fit(OnGpu(), ps.MirroredStrategy(["cuda:0"] * 2))
    often = fit(OnGpu(), ps.MirroredStrategy(["cuda:0"] * 2), settings={"checkpoint.every_steps": 2})
    assert digest(often) == digest(quiet)
