"""A training script by the compose file of scripts: it trains, and kills of a worker and of the script cost nothing."""

from __future__ import annotations

import json

from composed_job import eventually
from container_engine import ROOT

from support.script_run import LEDGER

OPEN = LEDGER.replace("shards=2, workers=2, ", "")
FIT = (
    "trainer.fit(data, epochs=EPOCHS, batch_size=4, resume=True)\nprint(json.dumps(trainer.evaluate(data)['least']))\n"
)
KILLED = 137
HELD = 20  # steps that are complete while later ones wait


def test_kills_of_a_worker_and_of_the_script_and_a_stop_cost_no_example(compose_script, tmp_path):
    (tmp_path / "slow").touch()
    script = compose_script(OPEN + FIT, "20 async", workers=2)
    script.wait_for_steps(HELD, workers=2)
    for name, container in script.containers().items():
        host = container["HostConfig"]
        assert container["Config"]["User"] == "10001:10001", name
        assert host["ReadonlyRootfs"], name
        assert not container["BoundingCaps"], name
    script.crash("worker_2")
    script.wait_for_steps(HELD, workers=2)
    script.crash("train_1")
    script.wait_for_steps(HELD, workers=1)
    for volume, says, code in (("tls-worker", "allowed: operator", 2), ("tls-train", "steps", 0)):
        asked = script.visit("parashard", "status", "train:7100", "--tls-dir", "/tls", volume=volume)
        assert asked.returncode == code, asked.stderr
        assert says in asked.stdout + asked.stderr
    unauthenticated = script.visit("parashard", "status", "train:7100", volume="tls-worker")
    assert unauthenticated.returncode == 75, unauthenticated.stderr
    refused = "the coordinator refuses a process without a certificate"
    eventually(lambda: refused in script.log("train_1"), "the script says so", told=lambda: script.log("train_1"))
    script.stop("train_1")
    assert script.container("train_1")["State"]["ExitCode"] != KILLED, "it ended by itself"
    assert "stopping: shards save their state" in script.log("train_1")
    script.up_again()
    script.wait_for_steps(HELD, workers=1)
    (tmp_path / "slow").unlink()
    lines = script.output()
    assert json.loads(lines[-1]) == 20.0
    begun = [line for line in lines if "no workers: the job waits until one joins" in line]
    assert "parashard worker --connect train:7100 --tls-dir DIR train.py 20 async" in begun[0]
    (run,) = script.ask_volume("ls", "/stored").split()
    assert run.startswith("train-"), "each start went on with the first one's run"
    eventually(lambda: not running(script), "every worker has ended", told=lambda: running(script))


def running(script):
    """Return the state of each container that has not ended well."""
    states = {name: container["State"] for name, container in script.containers().items()}
    return {name: state for name, state in states.items() if (state["Status"], state["ExitCode"]) != ("exited", 0)}


def test_the_example_trains_to_its_accuracy(compose_script):
    text = (ROOT / "examples" / "digits_layers.py").read_text()
    script = compose_script(text, "--epochs 20", workers=3)
    assert json.loads(script.output()[-1])["accuracy"] >= 0.95
