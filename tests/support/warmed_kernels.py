"""Loads every kernel, or compiles it; as a program it prints the modules that it has then."""

from __future__ import annotations

import sys

from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer
from support.optimizer_specs import SPECS


def warm_up_everything() -> None:
    """Warm up all kernels, as a shard's start does with those of its job."""
    fused.warm_up()
    for spec, _ in SPECS.values():
        Optimizer(spec).warm_up()


if __name__ == "__main__":
    warm_up_everything()
    sys.stdout.write("\n".join(sys.modules))
