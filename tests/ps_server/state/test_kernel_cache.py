"""A shard's start compiles nothing that an earlier one has compiled, and a push nothing at all."""

import os
import subprocess
import sys

import numpy as np
import pytest

from parashard.plan.variables import Variable
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer
from support.optimizer_specs import SPECS
from support.warmed_kernels import LOOPS, warm_up_everything


@pytest.mark.timeout(600)
def test_a_second_start_compiles_nothing() -> None:
    warm_up_everything()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "support.warmed_kernels"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert second.returncode == 0, second.stderr
    found = {name: (int(hits), int(misses)) for name, hits, misses in map(str.split, second.stdout.splitlines())}
    assert {name for name, (hits, _) in found.items() if hits} >= {*SPECS, "is_finite", "accumulate", "copy"} - {"lamb"}
    assert {name: misses for name, (_, misses) in found.items() if misses} == {}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("received", [False, True])
def test_after_the_warm_up_a_push_compiles_nothing(kind: str, received: bool) -> None:
    optimizer = Optimizer(SPECS[kind][0])
    fused.warm_up()
    optimizer.warm_up()
    known = {name: len(loop.signatures) for name, loop in LOOPS.items()}
    weights, total, gradient = np.ones((3, 100), np.float32)
    gradient.flags.writeable = not received
    slots = {name: np.ones(100, np.float32) for name in optimizer.slots}
    assert fused.is_finite(gradient)
    fused.accumulate(total, gradient)
    optimizer.update(weights, gradient, slots, t=1, scale=0.5, damping=1.0, variable=Variable("w", (100,)))
    fused.copy(total, gradient)
    fused.delay_compensated(total, weights, slots.get("v", np.zeros(100, np.float32)), 0.5)
    assert {name: len(loop.signatures) for name, loop in LOOPS.items()} == known
