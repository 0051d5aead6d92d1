"""A shard's start compiles nothing that an earlier one has compiled, and a push loads nothing at all."""

import os
import subprocess
import sys

import numpy as np
import pytest

from parashard.plan.variables import Variable
from parashard_server.state.kernels import fused
from parashard_server.state.kernels.compiling import LOOPS
from parashard_server.state.optimizer import Optimizer
from support.optimizer_specs import SPECS
from support.warmed_kernels import loaded, warm_up_everything


@pytest.mark.timeout(600)
def test_a_second_start_compiles_nothing() -> None:
    warm_up_everything()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "support.warmed_kernels"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert second.returncode == 0, second.stderr
    assert second.stdout == ""


@pytest.mark.parametrize("kind", SPECS)
def test_after_the_warm_up_a_push_loads_nothing(kind: str) -> None:
    optimizer = Optimizer(SPECS[kind][0])
    for declared in LOOPS.values():
        vars(declared).pop("code", None)
    fused.warm_up()
    optimizer.warm_up()
    before = loaded()
    weights, total, gradient = np.ones((3, 100), np.float32)
    gradient.flags.writeable = False
    slots = {name: np.ones(100, np.float32) for name in optimizer.slots}
    assert fused.is_finite(gradient)
    fused.accumulate(total, gradient)
    optimizer.update(weights, gradient, slots, t=1, scale=0.5, variable=Variable("w", (100,)))
    assert loaded() == before != []
