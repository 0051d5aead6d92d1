"""`python -m benchmarks.gpu [--parts NAME ...] [--data FOLDER] [--profile FOLDER] [--write [--results FOLDER]]`.

Measures what a GPU gains and what the way to it costs, in the order of what matters, for at most `--limit-s` seconds:

- models: a PyTorch ResNet with 1.2 and with 44 million parameters, alone, in one process of ours, and with a shard on
  the host and on the GPU;
- mlp: a small MLP of ours on CuPy, likewise;
- tests: the tests marked gpu;
- workers: the smaller ResNet by 2 and 4 workers that share the GPU, and by one that overlaps nothing;
- ipc: CUDA IPC beside the way through the host;
- shard, copies: a push and a pull inside of a shard, and copies by page-locked memory;
- accuracy: what the default makes of the smaller ResNet in three epochs, with `--data`;
- profiles: with `--profile`, py-spy's stacks of what has not reached its goal.

Each figure is of a process of its own with a limit of its own. What is over it, or fails, is a row that says so, and
the rest goes on. First two tiny runs, which count for nothing, import all that is imported and compile the kernels.
Figures are written after each row. Speeds are those of warm runs. `--device cpu` tries the command on tiny sizes, which
means nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import limited, marked
from benchmarks.gpu.limited import Found
from benchmarks.gpu.rows import RATE, SHARE, Row, below_goal, missing, row, sections
from benchmarks.tables import RESULTS, write
from benchmarks.training import clean_up_when_ended

CPU_PATIENCE = 4.0  # factor of all limits, since a CPU on which the command is tried may be busy
LOADING_S = 90.0  # of a run that may compile PyTorch's sources, and kernels
LEAST_S = 3.0  # a program is started only if this much time is left
ONE, HOST, CARD = "OneDeviceStrategy", "1 worker, shard on the host", "1 worker, shard on the GPU"
DEPTH_0, TWO, FOUR = f"{HOST}, pipeline_depth 0", "2 workers, shard on the host", "4 workers, shard on the host"
ACCURACY_WORDS = ("resnet", "--width", "64", "--batch", "256", "--steps", "78", "--epochs", "3")
Measure = Callable[[str, Sequence[str], float], Found]


class Model(NamedTuple):
    """A model whose speed is measured."""

    # table, alone: the title of its table, and the contestant without a server.
    table: str
    alone: str
    # words, small: arguments of `benchmarks.gpu.speed` for the real size, and for a try on a CPU.
    words: tuple[str, ...]
    small: tuple[str, ...]
    limit_s: float  # of each run
    cases: dict[str, float | None]  # measured cases, with their goals


PYTORCH, CUPY = "PyTorch alone", "CuPy with no server"
TRIED = ("--width", "1", "--batch", "4", "--steps", "12", "--seconds", "0.1")
TINY = ("--steps", "12", "--seconds", "0.3")
RESNET = Model(
    "ResNet of 1.2 M parameters, batch of 256",
    PYTORCH,
    ("resnet", "--width", "64", "--batch", "256", "--steps", "200"),
    ("resnet", "--width", "1", "--batch", "4", *TINY),
    40.0,
    {ONE: 0.9, HOST: 0.8, CARD: 0.85},
)
SHARING = RESNET._replace(cases={DEPTH_0: None, TWO: None, FOUR: None})
LARGE_RESNET = Model(
    "ResNet of 44 M parameters, batch of 128",
    PYTORCH,
    ("resnet", "--width", "384", "--batch", "128", "--steps", "40"),
    ("resnet", "--width", "2", "--batch", "4", *TINY),
    60.0,
    {ONE: 0.9, HOST: 0.85, CARD: 0.85},
)
MLP = Model(
    "MLP 64-1024-1024-10 of ours, batch of 128",
    CUPY,
    ("mlp", "--width", "1024", "--batch", "128", "--steps", "250"),
    ("mlp", "--width", "8", "--batch", "4", *TINY),
    30.0,
    {ONE: 0.9, CARD: 0.85, HOST: None},
)


class Asked(NamedTuple):
    """The arguments of the command line."""

    device: str
    turns: int
    rounds: int
    data: Path | None
    profile: Path | None

    @property
    def common(self) -> list[str]:
        """Return the arguments of every run of a model."""
        return ["--device", self.device, *(["--data", str(self.data)] if self.data else [])]

    def of(self, model: Model) -> list[str]:
        """Return the arguments of a model, of the size that suits the device."""
        kind, *sizes = model.small if self.device == "cpu" else model.words
        return [kind, *sizes]

    def words(self, model: Model, case: str) -> list[str]:
        """Return the arguments of a case of a model."""
        kind, *sizes = self.of(model)
        return [kind, *_case_words(case, self.device), *sizes, *self.common]


def _case_words(case: str, device: str) -> list[str]:
    """Return the arguments of `benchmarks.gpu.speed` for a case."""
    overlapped = "cluster", "--depth", "1"
    return {
        ONE: ["one"],
        HOST: [*overlapped],
        CARD: [*overlapped, "--shard-device", device],
        DEPTH_0: ["cluster", "--depth", "0"],
        TWO: [*overlapped, "--workers", "2"],
        FOUR: [*overlapped, "--workers", "4"],
    }.get(case, ["plain"])


def speeds(model: Model, asked: Asked, measure: Measure, known: float | None = None) -> Iterator[Row]:
    """Yield a row for each case of a model, against the same model with no server; once more after each round.

    `known` is the speed of the latter if it was measured before.
    """
    rates: dict[str, list[float]] = {case: [] for case in (model.alone, *model.cases)}
    for _ in range(asked.rounds):
        for case, measured in rates.items():
            if case == model.alone and known is not None:
                measured.append(known)
                continue
            found = measure("speed", asked.words(model, case), model.limit_s)
            measured.extend(told["examples_per_s"] for told in found.lines[-1:])
            if case == model.alone:
                if not measured:
                    yield missing(model.table, case, found.why)
                continue
            yield {
                **_compared(model, case, rates, found.why),
                "goal": model.cases[case],
                "phases_ms": found.lines[-1].get("phases_ms") if found.lines else None,
            }


def _compared(model: Model, case: str, rates: dict[str, list[float]], why: str) -> Row:
    ours, alone = rates[case], rates[model.alone]
    if not ours:
        return missing(model.table, case, why or "it told no speed")
    if not alone:
        return missing(model.table, case, f"{ours[-1]:,.0f} {RATE}")
    return row(model.table, case, model.alone, RATE, (ours, alone))


def models(asked: Asked, measure: Measure, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows of both ResNets."""
    yield from speeds(RESNET, asked, measure)
    yield from speeds(LARGE_RESNET, asked, measure)


def mlp(asked: Asked, measure: Measure, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows of the MLP."""
    yield from speeds(MLP, asked, measure)


def workers(asked: Asked, measure: Measure, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows of the smaller ResNet by other numbers of workers."""
    known = next((one["its"] for one in rows if one["table"] == SHARING.table and "its" in one), None)
    yield from speeds(SHARING, asked, measure, known)


def tests(asked: Asked, measure: Measure, rows: Sequence[Row]) -> Iterator[Row]:
    """Run the tests marked gpu, and yield rows of their results."""
    if asked.device == "cpu":
        return
    found = measure("marked", [], 120.0)
    yield from found.lines
    if found.why:
        yield missing(marked.TABLE, "the rest", found.why)


def told(module: str, limit_s: float, *words: str) -> Callable[[Asked, Measure, Sequence[Row]], Iterator[Row]]:
    """Return a part whose rows a program prints."""

    def part(asked: Asked, measure: Measure, rows: Sequence[Row]) -> Iterator[Row]:
        turns = ["--turns", str(asked.turns), "--device", asked.device]
        found = measure(module, [*words, *turns], limit_s)
        yield from found.lines
        if found.why:
            yield missing(" ".join([module, *words]), "the rest", found.why)

    return part


def accuracy(asked: Asked, measure: Measure, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the accuracy of the default with 1 and 2 workers, beside PyTorch alone."""
    table, alone = "Accuracy of the ResNet of 1.2 M parameters after 3 epochs of 19,968 images", 0.0
    if asked.data is None:
        yield missing(table, "MNIST", "not measured: it needs --data FOLDER")
        return
    auto = ("cluster", "--consistency", "auto", "--workers")
    cases = {PYTORCH: ("plain",), "1 worker, auto": (*auto, "1"), "2 workers, auto": (*auto, "2")}
    kind, *sizes = ACCURACY_WORDS if asked.device != "cpu" else (*RESNET.small, "--epochs", "1")
    for case, words in cases.items():
        found = measure("speed", [kind, *words, *sizes, *asked.common], 50.0)
        if not found.lines:
            yield missing(table, case, found.why)
        elif case == PYTORCH:
            alone = found.lines[-1]["accuracy"]
        else:
            figures = [found.lines[-1]["accuracy"]], [alone]
            yield row(table, case, PYTORCH, SHARE, figures) if alone else missing(table, case, f"{figures[0][0]}")


def profiles(asked: Asked, measure: Measure, rows: Sequence[Row]) -> Iterator[Row]:
    """Run the cases below their goal again under py-spy, and yield rows with the names of the stacks' files."""
    if asked.profile is None:
        return
    asked.profile.mkdir(parents=True, exist_ok=True)
    for one in [one for one in rows if below_goal(one)]:
        model = next(model for model in (RESNET, LARGE_RESNET, MLP) if model.table == one["table"])
        name = f"{model.words[0]}-{model.words[2]}-{''.join(c if c.isalnum() else '_' for c in one['case'])}"
        beginning = str(asked.profile / name)
        found = measure("speed", [*asked.words(model, one["case"]), "--profile", beginning], model.limit_s)
        stacks = ", ".join(sorted(path.name for path in asked.profile.glob(f"{name}.*.raw")))
        said = found.why or stacks or "no stacks: py-spy is not installed"
        yield missing("Profiles", f"{one['table']}: {one['case']}", said)


PARTS: dict[str, Callable[[Asked, Measure, Sequence[Row]], Iterator[Row]]] = {
    "models": models,
    "mlp": mlp,
    "tests": tests,
    "workers": workers,
    "ipc": told("ipc", 40.0),
    "shard": told("memory", 40.0, "shard"),
    "copies": told("memory", 25.0, "copies"),
    "accuracy": accuracy,
    "profiles": profiles,
}


def within(limit_s: float, patience: float = 1.0, now_s: Callable[[], float] = time.monotonic) -> Measure:
    """Return a function that measures until `limit_s` is over, then refuses; `patience` multiplies each limit."""
    until_s = now_s() + limit_s

    def measure(module: str, words: Sequence[str], most_s: float) -> Found:
        left_s = until_s - now_s()
        if left_s < LEAST_S:
            return Found([], f"not measured: {limit_s:.0f} s were over")
        return limited.run(module, words, min(most_s * patience, left_s))

    return measure


def main() -> None:
    """Measure, and print each row at once; write all rows so far after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="NAME")
    parser.add_argument("--data", type=Path, help="folder of MNIST (default: generated images)")
    parser.add_argument("--profile", type=Path, help="folder for profiles of the cases below their goal")
    parser.add_argument(
        "--limit-s", type=float, default=300.0, help="time limit of all parts together (default: %(default)s)"
    )
    parser.add_argument("--turns", type=int, default=5, help="turns of copies and pushes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each model (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write gpu.json and gpu.md")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the results (default: benchmarks/results)"
    )
    given = parser.parse_args()
    clean_up_when_ended()
    with limited.bytecode_kept():
        _measure(given)


def _measure(given: argparse.Namespace) -> None:
    data, profile = (folder and folder.resolve() for folder in (given.data, given.profile))
    asked = Asked(given.device, given.turns, given.rounds, data, profile)
    if asked.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    measure = within(given.limit_s, CPU_PATIENCE if asked.device == "cpu" else 1.0)
    about = measure("about", ["--device", asked.device], 30.0)
    if about.why:
        sys.exit(f"benchmarks.gpu: nothing was measured: {about.why}")
    for case in (RESNET.alone, CARD):  # their rows report a failure
        measure("speed", ["resnet", *_case_words(case, asked.device), *TRIED, *asked.common], LOADING_S)
    found: dict[tuple[str, str], Row] = {}
    for name in given.parts:
        for one in PARTS[name](asked, measure, list(found.values())):
            found[one["table"], one["case"]] = one  # a later round's row takes the place of the one before
            shown: dict[str, Any] = {key: value for key, value in one.items() if value is not None}
            print(name, shown, flush=True)
            if given.write:
                _write(list(found.values()), about.lines[-1]["about"], given.results)
    for heading, text in sections(list(found.values()), about.lines[-1]["about"]).items():
        print(f"\n{heading}\n\n{text}")


def _write(rows: Sequence[Row], about: str, folder: Path) -> None:
    write("gpu", sections(rows, about), {"device": about, "rows": list(rows)}, folder)


if __name__ == "__main__":
    main()
