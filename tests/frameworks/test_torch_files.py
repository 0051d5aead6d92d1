"""Files of a PyTorch module with batch normalisation open in plain PyTorch, and a trainer goes on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from support.script_run import ScriptRun

torch = pytest.importorskip(
    "torch", reason="NO TEST OF ps.torch: PyTorch is not installed; `make test-frameworks` has it"
)
safetensors_torch = pytest.importorskip("safetensors.torch")

EXAMPLES, BATCH = 24, 4
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
Y = np.arange(EXAMPLES) % 2
COUNTERS = "1.num_batches_tracked", "calls"


class Net(torch.nn.Sequential):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))

    def forward(self, inputs: Any) -> Any:
        if self.training:
            self.calls += 1
        return super().forward(inputs)


def trainer() -> ps.Trainer:
    model = ps.torch.Model(Net, torch.nn.functional.cross_entropy, state={"calls": "counter"})
    return ps.Trainer(model, ps.SGD(0.1), ps.OneDeviceStrategy(threads=1))


def opened(path: Path) -> Any:
    """Return a module of plain PyTorch with a file's weights, all of them."""
    found = safetensors_torch.load_file(path)
    assert [found[name].dtype for name in COUNTERS] == [torch.int64] * 2
    net = Net()
    net.load_state_dict(found)
    return net.eval()


def test_files_of_checkpoints_and_of_the_end_have_whole_counters_and_open_in_plain_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = trainer()
    kept = ps.callbacks.ModelCheckpoint("kept/{epoch}.safetensors")
    history = mine.fit((X, Y), epochs=2, batch_size=BATCH, validation_data=(X, Y), callbacks=[kept], verbose=0)
    for epoch in (1, 2):
        net = opened(tmp_path / f"kept/{epoch}.safetensors")
        assert (int(net[1].num_batches_tracked), net.calls.tolist()) == (6 * epoch, [6 * epoch] * 2)
    loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(X)), torch.from_numpy(Y)).item()
    assert loss == pytest.approx(history.history["val_loss"][-1], rel=1e-5)
    last = opened(history.run_dir / "weights.safetensors")
    assert np.allclose(last(torch.from_numpy(X)).detach().numpy(), mine.predict(X), atol=1e-6)


def test_best_weights_with_counters_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[float] = []

    class Judged(ps.callbacks.Callback):
        uses_weights = True

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            seen.append(self.trainer.model().calls[0].item())

    best = ps.callbacks.EarlyStopping(patience=5, restore_best_weights=True, mode="max")  # the first epoch's are best
    mine = trainer()
    fit = {"epochs": 3, "batch_size": BATCH, "validation_data": (X, Y), "verbose": 0}
    first = mine.fit((X, Y), callbacks=[best, Judged()], **fit)
    assert seen == [6, 12, 18]
    highest = int(np.argmax(first.history["val_loss"])) + 1
    assert mine.model()[1].num_batches_tracked.item() == 6 * highest
    mine.fit((X, Y), **fit)
    assert mine.model()[1].num_batches_tracked.item() == mine.model().calls[1].item() == 6 * highest + 18


CLUSTER = """
import numpy as np, torch
import parashard as ps

net = lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
x, y = np.ones((24, 3), np.float32), np.arange(24) % 2
trainer = ps.Trainer(ps.torch.Model(net, torch.nn.functional.cross_entropy), ps.SGD(0.1))
kept = ps.callbacks.ModelCheckpoint("{epoch}.safetensors")
trainer.fit((x, y), epochs=2, batch_size=4, validation_data=(x, y), callbacks=[kept], verbose=0)
"""


@pytest.mark.xdist_group("frameworks")
def test_a_worker_stores_them_so_too(tmp_path: Path) -> None:
    run = ScriptRun(tmp_path, CLUSTER)
    try:
        assert run.wait() == 0, run.complaint()
    finally:
        run.clean_up()
    counted = safetensors_torch.load_file(tmp_path / "2.safetensors")["1.num_batches_tracked"]
    assert (counted.dtype, int(counted)) == (torch.int64, 12)
