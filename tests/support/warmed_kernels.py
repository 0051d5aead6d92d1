"""Compiles every kernel, or finds it compiled; as a program it prints each loop's cache hits and misses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from parashard_server.state.kernels import fused, loops
from parashard_server.state.optimizer import Optimizer
from support.optimizer_specs import SPECS

LOOPS: dict[str, Callable[..., Any]] = {name: loop for name, loop in vars(loops).items() if hasattr(loop, "stats")}


def warm_up_everything() -> None:
    """Warm up all kernels, as a shard's start does."""
    fused.warm_up()
    for spec, _ in SPECS.values():
        Optimizer(spec).warm_up()


if __name__ == "__main__":
    warm_up_everything()
    for name, loop in LOOPS.items():
        sys.stdout.write(f"{name} {sum(loop.stats.cache_hits.values())} {sum(loop.stats.cache_misses.values())}\n")
