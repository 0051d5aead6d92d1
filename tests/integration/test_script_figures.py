"""The figures of a fit count each step once, whatever is killed on real processes."""

from __future__ import annotations

import json
from collections.abc import Callable

from support.cluster_run import eventually
from support.script_run import LEDGER, ScriptRun

NUMBERED = (
    LEDGER.replace("return 0.5,", "return float(batch.step),")
    + """
history = trainer.fit(data, epochs=EPOCHS, batch_size=4, verbose=0, resume="resume" in sys.argv)
print(json.dumps([history.history, history.report]))
"""
)
"""Each step's loss is its number: of 15 steps an epoch they are 7, 22 and 37 in the mean."""


# No worker dies with its coordinator: what it reported within two seconds is then known to neither (docs/callbacks.md).
def test_an_epoch_s_loss_and_the_examples_count_each_step_once(start: Callable[..., ScriptRun]) -> None:
    run = start(NUMBERED, "3", "async")
    (run.folder / "slow").touch()
    eventually(lambda: run.steps_complete() > 10, "steps are complete", told=run.complaint)
    for name in ("coordinator", "shard-1"):
        run.kill(name)
    (run.folder / "slow").unlink()
    assert run.wait() == 0, run.complaint()
    history, report = json.loads(run.output())
    assert history["loss"] == [7.0, 22.0, 37.0]
    assert report["examples_per_s"] * report["wall_s"] >= 180
    assert report["coordinator_restarts"] == 1
    assert report["shard_restarts"] == 1
