"""What a GPU gains, and what the way to it costs: `python -m benchmarks.gpu [--write]`.

Three tables, each a ratio in one run:

- a worker's step on the GPU, pulls and pushes overlapped, with the shard's arrays on the host and on the GPU, against
  the same training by CuPy with no server;
- copies to and from the GPU by page-locked against ordinary memory;
- a push and the pull after it, inside of one shard: arrays on the host against arrays on the GPU.

Where there is no CUDA device every row says "not measured", and why.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import RESULTS, table, write
from benchmarks.training import clean_up_when_ended, trained
from parashard.data import open_source
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.job.schema import Job
from parashard.models.building import build_model
from parashard.plan.optimizers import SGD, Adam, OptimizerSpec
from parashard.plan.partition import Plan, place, split, whole
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Variable, initial_rows
from parashard.process import cuda
from parashard_server.state.cuda_device import CudaDevice
from parashard_server.state.cuda_storage import CudaStorage, ShardDevice, warm_up
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import Storage, drawn_from
from parashard_worker.device import Gpu

Row = dict[str, Any]
"""`table`, `case`, `peer`, and `ours_ms`, `peer_ms`, `ratio`: None where they were not measured."""

JOB = Path(__file__).parent.parent / "examples" / "digits.toml"
SETTINGS = (
    "model.hidden=[1024, 1024]",
    "job.batch_size=128",
    "job.epochs=200",
    "evaluation.every_epochs=0.0",
    "checkpoint.every_s=0.0",
    "cluster.workers=1",
    "cluster.shards=1",
    "cluster.pipeline_depth=1",
    "consistency.policy=async",
)
STEP, COPY, SHARD = "A worker's step", "A copy", "Push and pull in a shard"
NO_SERVER, PAGEABLE, ON_HOST = "CuPy with no server", "ordinary memory", "arrays on the host"
RULES: dict[str, OptimizerSpec] = {"sgd": SGD(learning_rate=0.01), "adam": Adam(learning_rate=0.01)}
SIZES_MIB = (1, 4, 64)


class NoServer:
    """A job's training by one process on its device, variables and slots included.

    Parameters
    ----------
    job : Job
        What to train.
    device : Device
        Where.
    kernels : module
        The update rules for that device.
    """

    def __init__(self, job: Job, device: ShardDevice, kernels: Any) -> None:
        self.batch = job.job.batch_size
        self._device = device
        self._source = open_source(job.data)
        self._model = build_model(job.model, self._source.spec, job.job.seed, None)
        self._plan = StepPlan(self._source.spec.examples, job.job.batch_size, job.job.epochs, job.job.seed)
        self._optimizer = Optimizer(job.optimizer.resolved(self._plan.total), kernels)
        declared = self._model.initial_variables()
        self._declared = {name: v for name, v in declared.items() if isinstance(v, Variable)}
        first = {n: initial_rows(v, job.job.seed, 0, v.rows).reshape(v.shape) for n, v in self._declared.items()}
        self.variables = dict(device.variables_from_host({name: values.copy() for name, values in first.items()}))
        self._slots = {
            name: {s: device.xp.full(v.size, x, np.float32) for s, x in self._optimizer.initial_values.items()}
            for name, v in self.variables.items()
        }

    def step(self, step: int) -> float:
        """Take a step and return its loss; with that, all of it is done."""
        indices = self._plan.indices(step)
        inputs, targets = self._source.examples(indices)
        batch = self._device.batch_from_host(Batch(step, self._plan.epoch_of(step), indices, inputs, targets))
        loss, gradients = self._model.loss_and_gradients(self.variables, batch, self._device.xp)
        for name, gradient in gradients.items():
            self._optimizer.update(
                self.variables[name].reshape(-1),
                gradient.reshape(-1),
                self._slots[name],
                t=step + 1,
                scale=1.0,
                variable=self._declared[name],
            )
        return self._device.to_host(loss, {})[0]

    def ms_per_step(self, steps: int) -> float:
        """Return the mean time of so many steps, after one that is not counted."""
        self.step(0)
        began_s = time.perf_counter()
        for step in range(1, steps + 1):
            self.step(step)
        return 1000 * (time.perf_counter() - began_s) / steps


def worker_step_rows(settings: Sequence[str], no_server: NoServer, *, turns: int) -> list[Row]:
    """Return a row for a job's step with shards on the host, and one with shards on the GPU.

    Parameters
    ----------
    settings : sequence of str
        KEY=VALUE of the job, with where workers compute.
    no_server : NoServer
        The same job without any server.
    turns : int
        How often each of the three is run.
    """
    devices = dict(zip(step_cases(), ("cpu", "cuda"), strict=True))
    times: dict[str, list[float]] = {name: [] for name in (*devices, NO_SERVER)}
    for _ in range(turns):
        for case, device in devices.items():
            report = trained("run", JOB, [*settings, f"cluster.shard_device={device}"])
            assert set(report["steps_applied"]) == {report["steps_total"]}, report["steps_applied"]
            times[case].append(1000 * no_server.batch / report["examples_per_s"])
        times[NO_SERVER].append(no_server.ms_per_step(report["steps_total"] - 1))
    return [row(STEP, case, times[case], NO_SERVER, times[NO_SERVER]) for case in devices]


def copy_rows(device: ShardDevice, sizes_mib: Sequence[float], *, turns: int) -> list[Row]:
    """Return a row for each size and direction: page-locked memory against ordinary memory."""
    found = []
    for size_mib in sizes_mib:
        elements = int(size_mib * 2**18)
        resident = device.full(elements, 1.0)
        memory = {"locked": device.staging(elements), "ordinary": np.zeros(elements, np.float32)}
        memory["locked"][:] = 0.0
        calls: dict[str, Callable[[], None]] = {}
        for kind, host in memory.items():
            calls[f"in, {kind}"] = partial(device.copy_in, resident, host)
            calls[f"out, {kind}"] = partial(device.copy_out, host, resident)
        times = timed(calls, turns)
        found += [
            row(COPY, case, times[f"{way}, locked"], PAGEABLE, times[f"{way}, ordinary"])
            for case, way in zip(copy_cases([size_mib]), ("in", "out"), strict=True)
        ]
    return found


def shard_rows(device: ShardDevice, sizes_mib: Sequence[float], *, turns: int) -> list[Row]:
    """Return a row for each size and rule: a storage on the GPU against one on the host, which must agree."""
    found = []
    for size_mib in sizes_mib:
        plan = one_variable(int(size_mib * 2**18))
        for case, spec in zip(shard_cases([size_mib]), RULES.values(), strict=True):
            on_device = Optimizer(spec, device.kernels)
            warm_up(device, on_device)
            storages = {
                "GPU": CudaStorage(plan, 0, on_device, drawn_from(0), device=device),
                "host": Storage(plan, 0, Optimizer(spec, fused), drawn_from(0)),
            }
            times = timed({name: moves(storage) for name, storage in storages.items()}, turns)
            assert np.array_equal(storages["GPU"].weights, storages["host"].weights), f"{case}: other weights"
            found.append(row(SHARD, case, times["GPU"], ON_HOST, times["host"]))
    return found


def moves(storage: Storage) -> Callable[[], None]:
    """Return what pushes once more, and reads what has moved into memory of its own, as a pull would."""
    gradient = np.random.default_rng(0).standard_normal(storage.elements, np.float32)
    pulled = bytearray(storage.weights.nbytes)
    pushes = iter(range(1, 1_000_000))

    def move() -> None:
        t = next(pushes)
        storage.apply(gradient, t=t)
        for run in storage.moved(0, storage.weights.nbytes, t - 1):
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


def row(of: str, case: str, ours_ms: Sequence[float], peer: str, peer_ms: Sequence[float]) -> Row:
    """Return a row of medians."""
    ours, theirs = statistics.median(ours_ms), statistics.median(peer_ms)
    return {"table": of, "case": case, "peer": peer, "ours_ms": ours, "peer_ms": theirs, "ratio": theirs / ours}


def step_cases() -> list[str]:
    """Return what is measured of a worker's step."""
    return ["shards on the host", "shards on the GPU"]


def copy_cases(sizes_mib: Sequence[float]) -> list[str]:
    """Return what is measured of copies."""
    return [f"{size} MiB {way} the GPU" for size in sizes_mib for way in ("to", "from")]


def shard_cases(sizes_mib: Sequence[float]) -> list[str]:
    """Return what is measured inside of a shard."""
    return [f"{rule}, {size} MiB" for size in sizes_mib for rule in RULES]


def not_measured() -> list[Row]:
    """Return every row that a GPU would fill."""
    nothing = {"ours_ms": None, "peer_ms": None, "ratio": None}
    cases = (
        (STEP, NO_SERVER, step_cases()),
        (COPY, PAGEABLE, copy_cases(SIZES_MIB)),
        (SHARD, ON_HOST, shard_cases(SIZES_MIB)),
    )
    return [{"table": of, "case": case, "peer": peer, **nothing} for of, peer, found in cases for case in found]


def sections(rows: Sequence[Row], device: str) -> dict[str, str]:
    """Return the tables as Markdown by heading; the first text names the GPU, or says why there is none."""
    found = {"GPU": device}
    for of in dict.fromkeys(row["table"] for row in rows):
        lines = [
            [r["case"], shown(r["ours_ms"]), r["peer"], shown(r["peer_ms"]), shown(r["ratio"], " x")]
            for r in rows
            if r["table"] == of
        ]
        found[of] = table(("case", "ms", "against", "its ms", "its over ours"), lines)
    return found


def shown(figure: float | None, unit: str = "") -> str:
    """Return a figure as text, or that there is none."""
    return "not measured" if figure is None else f"{figure:.3f}{unit}"


def measured(turns: int) -> tuple[list[Row], str]:
    """Return every row, and the GPU's name; without a GPU, rows without figures, and why."""
    try:
        device = CudaDevice(0)
    except ConfigurationError as error:
        return not_measured(), str(error)
    settings = [*SETTINGS, "cluster.device=cuda:0"]
    job = load_job(JOB, [parse_set(setting) for setting in settings], {}).job
    rows = worker_step_rows(settings, NoServer(job, Gpu(0), device.kernels), turns=turns)
    rows += copy_rows(device, SIZES_MIB, turns=turns)
    return rows + shard_rows(device, SIZES_MIB, turns=turns), cuda.device_name(0)


def main() -> None:
    """Measure what can be, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write gpu.json and gpu.md under {RESULTS.name}")
    arguments = parser.parse_args()
    clean_up_when_ended()
    rows, device = measured(arguments.turns)
    tables = sections(rows, device)
    for heading, text in tables.items():
        print(f"{heading}\n\n{text}\n")
    if arguments.write:
        write("gpu", tables, {"device": device, "turns": arguments.turns, "rows": rows})


if __name__ == "__main__":
    main()
