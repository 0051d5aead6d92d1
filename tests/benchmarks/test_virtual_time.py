"""The laboratory's virtual time is the product: one worker has the bits of one machine, and kills change no round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import parashard as ps
from benchmarks.statistics.methods import ADAM, MOMENTUM
from benchmarks.statistics.schedule import PLAIN, Schedule
from benchmarks.statistics.tasks import make
from benchmarks.statistics.trial import Trial
from benchmarks.statistics.virtual import simulate

KILLS = {"kill_every_s": 1.0, "shard_kill_every_s": 2.0}


@pytest.fixture(scope="module")
def trial() -> Trial:
    return replace(make("mlp", 0, None), epochs=2)


def test_one_worker_has_the_bits_of_one_machine(trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = ps.Trainer(trial.model, trial.optimizer, ps.OneDeviceStrategy(threads=1))
    history = trainer.fit(trial.train, epochs=2, batch_size=trial.batch_size, validation_data=trial.held_out, verbose=0)
    outcome = simulate(trial, PLAIN, 0, points=2)
    assert outcome.sha256 == history.report["weights_sha256"]
    assert outcome.metrics == pytest.approx(trainer.evaluate(trial.held_out))
    assert [epochs for epochs, _ in outcome.curve] == [1.0, 2.0]


def test_rounds_have_the_same_bits_under_kills(trial: Trial) -> None:
    calm = simulate(trial, Schedule("sync:4", 4), 0)
    killed = simulate(trial, Schedule("sync:4", 4, **KILLS), 0)  # type: ignore[arg-type]
    assert killed.kills > 2
    assert killed.sha256 == calm.sha256


def test_batches_that_are_split_have_the_bits_of_calm_workers_under_kills(trial: Trial) -> None:
    calm, killed = (simulate(trial, Schedule("auto", 4, **kills), 0) for kills in ({}, KILLS))  # type: ignore[arg-type]
    assert killed.kills > 2
    assert calm.staleness.keys() == {0}
    assert killed.losses != calm.losses
    assert killed.sha256 == calm.sha256


def test_async_applies_each_step_once_under_kills_and_is_the_same_again(trial: Trial) -> None:
    outcomes = [simulate(trial, Schedule("async", 4, **KILLS), 3) for _ in range(2)]  # type: ignore[arg-type]
    assert outcomes[0].kills > 0
    assert outcomes[0].curve[-1][0] == 2.0
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("workers", "depth", "staleness"), [(1, 0, 0), (1, 1, 1), (4, 0, 3), (4, 1, 7)])
def test_workers_of_one_speed_have_the_expected_staleness(
    trial: Trial, workers: int, depth: int, staleness: int
) -> None:
    counted = simulate(trial, Schedule("async", workers, depth), 0).staleness
    assert counted.most_common(1)[0][0] == staleness


def test_a_slow_worker_has_pushes_of_a_high_staleness(trial: Trial) -> None:
    assert max(simulate(trial, Schedule("async", 4, slowest=0.1), 0).staleness) > 15


@pytest.mark.parametrize("optimizer", [ps.Momentum(0.02, momentum=0.9), ps.Adam(1e-3), ps.AdamW(1e-3)])
def test_the_reference_of_a_method_is_the_product_s_rule(trial: Trial, optimizer: object) -> None:
    trial = replace(trial, optimizer=optimizer)
    methods = MOMENTUM if isinstance(optimizer, ps.Momentum) else ADAM
    reference = next(iter(methods.values()))(optimizer, 1)
    ours = simulate(trial, Schedule("async"), 0)
    theirs = simulate(trial, Schedule("async"), 0, method=reference)
    assert np.allclose(ours.losses, theirs.losses, rtol=1e-2)


def test_drift_is_measured_of_one_machine(trial: Trial) -> None:
    drift = simulate(trial, PLAIN, 0, drift_every=10).drift
    assert len(drift) == 9
    assert all(0 < found < 3 for found in drift)
    assert simulate(trial, PLAIN, 0, drift_every=10).sha256 == simulate(trial, PLAIN, 0).sha256
