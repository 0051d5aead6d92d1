"""How long the update rules take, against a two-thread copy of as many bytes: `python -m benchmarks.kernels`.

Everything takes turns in one run: the copy (the yardstick: what the memory allows), NumPy's copy, every kernel on one
thread and on all, and NumPy. Before it is timed, each kernel must have its reference's bits on every
number of threads. Then every rule once more, with slots that have seen 2,000 gradients of zeros: a processor takes
several times as long for denormal numbers, which a slot would decay to. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.tables import RESULTS, load_before, table, write
from parashard.process.resources import cores
from parashard_server.state.kernels import fused
from parashard_server.state.kernels.rules import RULES
from tests.support import reference_rules as reference

Float32s = NDArray[np.float32]
Call = Callable[[], object]

YARDSTICK = "two-thread copy"
TARGETS = {"sgd": 1.2, "adam": 2.4}
"""Maximum time of a kernel at TARGET_SIZE_MIB on all threads, relative to the yardstick."""
TARGET_SIZE_MIB = 64
COMMON: dict[str, Any] = {"learning_rate": 1e-6, "weight_decay": 0.01, "clip": math.inf, "scale": 0.5}
ADAM: dict[str, Any] = COMMON | {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "t": 3}
UPDATES: dict[str, tuple[str, dict[str, Any]]] = {  # rule: (its vectors beside weights and gradient, settings)
    "sgd": ("", COMMON),
    "momentum": ("m", COMMON | {"momentum": 0.9}),
    "nesterov": ("m", COMMON | {"momentum": 0.9}),
    "adagrad": ("v", COMMON | {"epsilon": 1e-10}),
    "rmsprop": ("v", COMMON | {"rho": 0.9, "epsilon": 1e-8}),
    "adam": ("mv", ADAM),
    "adamw": ("mv", ADAM),
    "ftrl": ("mv", COMMON | {"beta": 1.0, "l1": 1e-3, "l2": 0.1, "learning_rate": 0.1}),
    "lamb": ("mv", ADAM),
}
KERNELS = (*UPDATES, "is_finite", "accumulate")
NUMPY = SimpleNamespace(
    update=partial(reference.update, kind=np.ndarray), is_finite=reference.is_finite, accumulate=reference.accumulate
)
"""The timed reference: without its emulation of flushed denormals, which NumPy lacks."""

ZEROS = 2_000
ZEROS_ELEMENTS = 1_100_000
ZEROS_TARGET = 1.1
"""Maximum time of an update after ZEROS gradients of zeros, relative to its normal time."""
ROW = 16
"""Elements of a row, for rules that update rows of a table."""
AFTER_ZEROS = (*UPDATES, "adam by row", "adamw by row", "rowwise_adagrad")


class Vectors:
    """Weights, a gradient, the two vectors of optimizer state that the rules share, and one to copy into."""

    def __init__(self, elements: int) -> None:
        rng = np.random.default_rng(0)
        self.weights, self.gradient = (rng.random(elements, dtype=np.float32) - np.float32(0.5) for _ in range(2))
        self.state = {"m": rng.random(elements, dtype=np.float32), "v": rng.random(elements, dtype=np.float32)}
        self.other: Float32s = np.zeros(elements, np.float32)

    def all(self) -> list[Float32s]:
        """Return every vector."""
        return [self.weights, self.gradient, *self.state.values(), self.other]

    def calls(self, kernels: Any) -> dict[str, Call]:
        """Return each kernel as a call on these vectors."""

        def update(rule: str) -> Call:
            slots, settings = UPDATES[rule]
            state = [self.state[slot] for slot in slots]
            values = RULES[rule].values(settings)
            return lambda: kernels.update(rule, values, self.weights, self.gradient, *state)

        return {rule: update(rule) for rule in UPDATES} | {
            "is_finite": lambda: kernels.is_finite(self.gradient),
            "accumulate": lambda: kernels.accumulate(self.other, self.gradient),
        }


def check(elements: int, threads: int) -> None:
    """Assert that every kernel has its reference's bits."""
    for name in KERNELS:
        results: list[list[Any]] = []
        for kernels, used in ((reference, 1), (fused, 1), (fused, threads)):
            fused.use_threads(used)
            vectors = Vectors(elements)
            answer = vectors.calls(kernels)[name]()
            results.append([*(vector.view(np.uint32) for vector in vectors.all()), answer])
        for found in results[1:]:
            same = all(np.array_equal(a, b) for a, b in zip(found, results[0], strict=True))
            assert same, f"{name} of {elements} elements on {threads} threads differs from its reference"


def measure(size_mib: int, threads: int, turns: int) -> dict[str, list[float]]:
    """Return milliseconds by "kernel, who", such as "adam, 2 threads", one for each turn."""
    elements = size_mib << 18
    vectors = Vectors(elements)
    gradient, copied = vectors.gradient, vectors.other
    half = elements // 2
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Call) -> None:
        begin_s = time.perf_counter()
        call()
        times.setdefault(name, []).append((time.perf_counter() - begin_s) * 1e3)

    with ThreadPoolExecutor(1) as other:

        def copy_in_halves() -> None:
            lower = other.submit(np.copyto, copied[:half], gradient[:half])
            np.copyto(copied[half:], gradient[half:])
            lower.result()

        for _ in range(turns + 1):
            timed(YARDSTICK, copy_in_halves)
            timed("np.copyto", lambda: np.copyto(copied, gradient))
            for used in sorted({1, threads}):
                fused.use_threads(used)
                fused.accumulate(copied, gradient)  # starts the threads
                for name, call in vectors.calls(fused).items():
                    timed(f"{name}, {used} threads", call)
            for name, call in vectors.calls(NUMPY).items():
                timed(f"{name}, NumPy", call)
    assert all(np.isfinite(v).all() for v in vectors.all())
    return {name: found[1:] for name, found in times.items()}  # the first turn faults pages in


def rows(size_mib: int, threads: int, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each kernel and number of threads, with its ratio to the yardstick and to NumPy."""
    medians = {name: statistics.median(found) for name, found in times.items()}
    yardstick_ms = medians[YARDSTICK]
    found: list[dict[str, Any]] = [
        {"kernel": "np.copyto", "threads": 1, "ours_ms": medians["np.copyto"], "numpy_ms": medians["np.copyto"]}
    ]
    for name in KERNELS:
        for used in sorted({1, threads}):
            ours_ms, numpy_ms = medians[f"{name}, {used} threads"], medians[f"{name}, NumPy"]
            found.append({"kernel": name, "threads": used, "ours_ms": ours_ms, "numpy_ms": numpy_ms})
    common = {"race": "apply kernel", "size_mib": size_mib, "peer": YARDSTICK, "peer_ms": yardstick_ms}
    return [common | row | {"ratio": row["ours_ms"] / yardstick_ms} for row in found]


def markdown(found: list[dict[str, Any]]) -> str:
    """Return the rows of one size as a table."""
    lines = []
    for row in found:
        target = TARGETS.get(row["kernel"]) if row["size_mib"] == TARGET_SIZE_MIB and row["threads"] > 1 else None
        lines.append(
            (
                row["kernel"],
                str(row["threads"]),
                f"{row['ours_ms']:.3f}",
                f"{row['ratio']:.2f}" + (f" (at most {target})" if target else ""),
                f"{row['numpy_ms'] / row['ours_ms']:.1f} x",
            )
        )
    return table(("kernel", "threads", "ms", "over the copy", "faster than NumPy"), lines)


def after_zeros(elements: int, zeros: int, turns: int) -> list[dict[str, Any]]:
    """Return a row for each rule: the least milliseconds of an update, and of one after so many gradients of zeros."""
    found = []
    for name in AFTER_ZEROS:
        normal, after = Vectors(elements), Vectors(elements)
        after.gradient[:] = 0.0
        calls = [_update_of(name, vectors) for vectors in (normal, after)]
        for _ in range(zeros):
            calls[1]()
        times: list[list[float]] = [[], []]
        for _ in range(turns):
            for call, of_call in zip(calls, times, strict=True):
                begin_s = time.perf_counter()
                call()
                of_call.append((time.perf_counter() - begin_s) * 1e3)
        normal_ms, after_ms = map(min, times)
        found.append({"rule": name, "normal_ms": normal_ms, "after_ms": after_ms, "ratio": after_ms / normal_ms})
    return found


def _update_of(name: str, vectors: Vectors) -> Call:
    """Return a rule as a call without weight decay, which would keep a gradient of zeros from being one."""
    rule, _, by_row = name.partition(" ")
    rows = vectors.weights.size // ROW
    slots, settings = ("v", COMMON | {"epsilon": 1e-10}) if rule == "rowwise_adagrad" else UPDATES[rule]
    if by_row:
        settings = settings | {"t": np.full(rows, settings["t"], np.uint32)}
    state = [vectors.state[slot][: rows if rule == "rowwise_adagrad" else None] for slot in slots]
    values = RULES[rule].values(settings | {"weight_decay": 0.0})
    return lambda: fused.update(rule, values, vectors.weights, vectors.gradient, *state)


def markdown_after_zeros(found: list[dict[str, Any]]) -> str:
    """Return the rows of `after_zeros` as a table."""
    lines = [(row["rule"], f"{row['normal_ms']:.3f}", f"{row['after_ms']:.3f}", f"{row['ratio']:.2f}") for row in found]
    return table(("rule", "normal ms", "ms after zeros", f"ratio (at most {ZEROS_TARGET})"), lines)


def main() -> None:
    """Check, measure at every size, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[1, 4, TARGET_SIZE_MIB])
    parser.add_argument("--threads", type=int, default=cores(), help="threads to compare with one (default: all cores)")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--write", action="store_true", help=f"write kernels.json and kernels.md under {RESULTS.name}")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    found, sections = [], {"Load": load_before(load)}
    for size_mib in arguments.sizes_mib:
        check((size_mib << 18) + 5, arguments.threads)
        of_size = rows(size_mib, arguments.threads, measure(size_mib, arguments.threads, arguments.turns))
        found += of_size
        copy_ms = of_size[0]["peer_ms"]
        sections[f"{size_mib} MiB, {YARDSTICK} {copy_ms:.3f} ms"] = markdown(of_size)
        print(f"{size_mib} MiB, {YARDSTICK} {copy_ms:.3f} ms\n{markdown(of_size)}\n")
    fused.use_threads(1)
    zeros = after_zeros(ZEROS_ELEMENTS, ZEROS, 4 * arguments.turns)  # short ones, of which the least counts
    heading = f"{ZEROS_ELEMENTS:,} elements on one thread, after {ZEROS:,} gradients of zeros"
    sections[heading] = markdown_after_zeros(zeros)
    print(f"{heading}\n{sections[heading]}\n")
    if arguments.write:
        write("kernels", sections, {"turns": arguments.turns, "load": load, "rows": found, "after_zeros": zeros})


if __name__ == "__main__":
    main()
