"""What moves between the host and a GPU: `python -m benchmarks.gpu.memory copies|shard --device cuda:N`.

Copies by page-locked against ordinary memory, and a push with the pull after it inside of one shard: arrays on the GPU
against arrays on the host. Prints a JSON object for each row. Called by `benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.rows import TIME, Row, row
from parashard.plan.optimizers import SGD, Adam, OptimizerSpec
from parashard.plan.partition import Plan, place, split, whole
from parashard.plan.variables import Variable
from parashard_server.state.cuda_device import open_device
from parashard_server.state.cuda_storage import CudaStorage, ShardDevice, warm_up
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import Storage, drawn_from

COPY, SHARD = "A copy", "Push and pull in a shard"
PAGEABLE, ON_HOST = "ordinary memory", "arrays on the host"
RULES: dict[str, OptimizerSpec] = {"sgd": SGD(learning_rate=0.01), "adam": Adam(learning_rate=0.01)}
SIZES_MIB = (1, 4, 64)


def copy_rows(device: ShardDevice, sizes_mib: Sequence[float], turns: int) -> Iterator[Row]:
    """Yield a row for each size and direction: page-locked memory against ordinary memory."""
    for size_mib in sizes_mib:
        elements = int(size_mib * 2**18)
        resident = device.full(elements, 1.0)
        memory = {"locked": device.staging(elements), "ordinary": np.zeros(elements, np.float32)}
        memory["locked"][:] = 0.0
        calls: dict[str, Callable[[], None]] = {}
        for kind, host in memory.items():
            calls[f"to {kind}"] = partial(_copied, device, device.copy_in, resident, host)
            calls[f"from {kind}"] = partial(_copied, device, device.copy_out, host, resident)
        times = timed(calls, turns)
        for way in ("to", "from"):
            figures = times[f"{way} locked"], times[f"{way} ordinary"]
            yield row(COPY, f"{size_mib} MiB {way} the GPU", PAGEABLE, TIME, figures)


def _copied(device: ShardDevice, copy: Callable[[Any, Any], None], first: Any, second: Any) -> None:
    copy(first, second)
    device.wait()


def shard_rows(device: ShardDevice, sizes_mib: Sequence[float], turns: int) -> Iterator[Row]:
    """Yield a row for each size and rule: a storage on the GPU against one on the host, which must agree."""
    for size_mib in sizes_mib:
        plan = one_variable(int(size_mib * 2**18))
        for rule, spec in RULES.items():
            on_device = Optimizer(spec, device.kernels)
            warm_up(device, on_device)
            storages = {
                "GPU": CudaStorage(plan, 0, on_device, drawn_from(0), device=device),
                "host": Storage(plan, 0, Optimizer(spec, fused), drawn_from(0)),
            }
            times = timed({name: moves(storage) for name, storage in storages.items()}, turns)
            case = f"{rule}, {size_mib} MiB"
            assert np.array_equal(storages["GPU"].weights, storages["host"].weights), f"{case}: other weights"
            yield row(SHARD, case, ON_HOST, TIME, (times["GPU"], times["host"]))


def moves(storage: Storage) -> Callable[[], None]:
    """Return a function that pushes once and copies the changed weights into its own memory, as a pull would."""
    gradient = np.random.default_rng(0).standard_normal(storage.elements, np.float32)
    pulled = bytearray(storage.weights.nbytes)
    pushes = iter(range(1, 1_000_000))

    def move() -> None:
        t = next(pushes)
        storage.apply(storage.received(gradient) if isinstance(storage, CudaStorage) else gradient, t=t)
        for run in storage.changed_runs(0, storage.weights.nbytes, t - 1):
            pulled[run.offset_bytes : run.offset_bytes + run.values.nbytes] = run.values

    return move


def one_variable(elements: int) -> Plan:
    """Return a plan of one shard with one variable."""
    variables = {"weight": Variable("weight", (elements,))}
    return place(variables, split(variables, whole), 1, version=1)


def timed(calls: dict[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    """Return milliseconds by name; the calls take turns, and the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            began_s = time.perf_counter()
            call()
            if turn:
                times[name].append(1000 * (time.perf_counter() - began_s))
    return times


def main() -> None:
    """Measure, and print each row at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["copies", "shard"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sizes-mib", type=float, nargs="+", default=SIZES_MIB)
    asked = parser.parse_args()
    device = open_device(asked.device, 0)
    if device is None:
        parser.error("--device cpu: these figures need a GPU")
    for found in {"copies": copy_rows, "shard": shard_rows}[asked.what](device, asked.sizes_mib, asked.turns):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
