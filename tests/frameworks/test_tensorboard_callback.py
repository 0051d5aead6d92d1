"""What TensorBoard's own reader finds in the files of the callback."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parashard.callbacks import TensorBoard, Training
from parashard.callbacks.running import Callbacks, Milestone


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_figures_of_epochs_are_scalars_by_their_names(tmp_path: Path) -> None:
    it = Callbacks([TensorBoard(tmp_path)], Training(0.1, tmp_path), None, steps_per_epoch=1, epochs=2)
    it.reached(Milestone(1, 0, [0.5], {"accuracy": 0.25}))
    it.reached(Milestone(2, 1, [0.25]))
    assert scalars(tmp_path / "train") == {"epoch_loss": [(0, 0.5), (1, 0.25)]}
    assert scalars(tmp_path / "validation") == {"epoch_accuracy": [(0, 0.25)]}
    it.end()
