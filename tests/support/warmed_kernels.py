"""Loads every kernel, or compiles it; as a program it prints the names of those that it had to compile."""

from __future__ import annotations

import sys

from parashard_server.state.kernels import fused
from parashard_server.state.kernels.compiling import LOOPS
from parashard_server.state.optimizer import Optimizer
from support.optimizer_specs import SPECS


def warm_up_everything() -> None:
    """Warm up all kernels, as a shard's start does with those of its job."""
    fused.warm_up()
    for spec, _ in SPECS.values():
        Optimizer(spec).warm_up()


def loaded() -> list[str]:
    """Return the names of the kernels that have been loaded or compiled."""
    return [name for name, declared in LOOPS.items() if "code" in vars(declared)]


if __name__ == "__main__":
    warm_up_everything()
    assert len(loaded()) > 10
    sys.stdout.write("\n".join(name for name in loaded() if LOOPS[name].code.stats.cache_misses))  # type: ignore[attr-defined]
