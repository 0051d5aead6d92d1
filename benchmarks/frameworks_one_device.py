"""`OneDeviceStrategy` against the framework alone: `python -m benchmarks.frameworks_one_device [--rounds N] [--write]`.

The same MLPs (784-256-128-10, and one with hidden layers of 2048 and 1536 whose steps take some 100 ms; Adam, batches
of 128, random data in memory), one thread each and one core for both: XLA computes beside a loop that does not wait,
which a second core would let JAX alone use. The framework's own loop takes slices of a permutation and has the
framework's own Adam (PyTorch's, optax' in the same compiled step, which takes the examples, too). Both take turns of
a few steps in one run: only the ratio counts, the median over the turns. Ours is all that `fit` does between its first
and last step: leases, pushes, the optimizer, the view, records; not its start and end. Beside the clock's time stands
that of the processor, which other processes disturb less on a machine that is shared. Keras (on JAX) has its own
`fit`: there the turns are processes of their own (`benchmarks.frameworks.cluster`), by the clock, after the first
epoch.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", NPROC="1", JAX_PLATFORMS="cpu")  # before a framework is imported

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import parashard as ps
from benchmarks.frameworks_cluster import run
from benchmarks.tables import spread, table, write
from parashard.data.base import Batch
from parashard.plan.variables import Variable
from parashard_server.state.optimizer import Optimizer

INPUTS, CLASSES = 784, 10
HIDDEN = (256, 128)
BATCH = 128
FIRST = 2  # turns that warm up
KERAS = "Keras on JAX"
TARGETS = {"PyTorch": 0.95, "JAX": 0.9, KERAS: 0.9}

RNG = np.random.default_rng(0)
X = RNG.random((BATCH * 500, INPUTS), dtype=np.float32) - np.float32(0.5)
Y = (X[:, :CLASSES] + X[:, CLASSES : 2 * CLASSES]).argmax(1)


class Length(NamedTuple):
    """How long a net is trained."""

    hidden: tuple[int, int]  # widths of its hidden layers
    # steps, epochs: of our run: steps of each epoch.
    steps: int
    epochs: int
    turn: int  # steps after which the other one takes as many
    keras_steps: int  # of Keras' turns, each a process; its first epoch is not measured


LENGTHS = (Length(HIDDEN, 500, 3, 50, 1800), Length((2048, 1536), 50, 3, 5, 150))

Times = tuple[float, float]
Plain = Callable[[], float]
"""Takes a step, and returns its loss, or an array that is still computed."""


class TakingTurns:
    """A model of ours; after every turn of steps the framework's own loop takes as many."""

    def __init__(self, model: Any, plain: Plain, turn: int) -> None:
        self._model = model
        self._plain = plain
        self._turn = turn
        # ours_s, plain_s: seconds of each turn, by the clock and of the processor.
        self.ours_s: list[Times] = []
        self.plain_s: list[Times] = []
        self.losses: list[float] = []
        self._steps = 0
        self._since_s = (0.0, 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def loss_and_gradients(self, variables: Mapping[str, Any], batch: Any, xp: Any) -> Any:
        """Compute a step, after a turn of the other."""
        if self._steps % self._turn == 0:
            now_s = _now_s()
            if self._steps:
                self.ours_s.append(_between(self._since_s, now_s))
            for _ in range(self._turn):
                loss = self._plain()
            self.losses.append(float(loss))
            self._since_s = _now_s()
            self.plain_s.append(_between(now_s, self._since_s))
        self._steps += 1
        return self._model.loss_and_gradients(variables, batch, xp)


def _now_s() -> Times:
    return time.perf_counter(), time.process_time()


def _between(first: Times, then: Times) -> Times:
    return then[0] - first[0], then[1] - first[1]


def sizes_of(hidden: Sequence[int]) -> tuple[int, ...]:
    """Return the widths of all layers, those of the inputs and classes among them."""
    return (INPUTS, *hidden, CLASSES)


def batches(steps: int) -> Callable[[], Any]:
    """Return a function that returns the next batch's indices: slices of a permutation, new every `steps` steps."""
    order, at = np.random.default_rng(1).permutation(steps * BATCH), 0

    def following() -> Any:
        nonlocal order, at
        if at >= len(order):
            order, at = np.random.default_rng(at).permutation(len(order)), 0
        at += BATCH
        return order[at - BATCH : at]

    return following


def pytorch(sizes: Sequence[int], steps: int) -> tuple[Any, Plain]:
    """Return a model of ours and PyTorch's own loop."""
    import torch
    from torch import nn

    torch.set_num_threads(1)

    def net() -> nn.Module:
        layers: list[nn.Module] = []
        for rows, columns in pairwise(sizes):
            layers += [nn.Linear(rows, columns), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    module = net()
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)
    x, y, following = torch.from_numpy(X), torch.from_numpy(Y), batches(steps)

    def step() -> float:
        indices = torch.from_numpy(following())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x[indices]), y[indices])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return ps.torch.Model(net, loss=nn.functional.cross_entropy), step


def jax(sizes: Sequence[int], steps: int) -> tuple[Any, Plain]:
    """Return a model of ours and JAX' own loop, with optax' Adam in the same compiled step."""
    import jax
    import jax.numpy as jnp
    import optax

    def init(key: Any) -> Any:
        return [
            {"weight": jax.random.normal(key, (rows, columns)) * (2 / rows) ** 0.5, "bias": jnp.zeros(columns)}
            for key, rows, columns in zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True)
        ]

    def loss(parameters: Any, inputs: Any, targets: Any, key: Any) -> Any:
        for layer in parameters[:-1]:
            inputs = jax.nn.relu(inputs @ layer["weight"] + layer["bias"])
        outputs = inputs @ parameters[-1]["weight"] + parameters[-1]["bias"]
        return -jax.nn.log_softmax(outputs)[jnp.arange(len(targets)), targets].mean()

    optimizer = optax.adam(1e-3)

    @jax.jit
    def update(parameters: Any, state: Any, inputs: Any, targets: Any, indices: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, inputs[indices], targets[indices], None)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    parameters = init(jax.random.key(0))
    state, x, y, following = optimizer.init(parameters), jnp.asarray(X), jnp.asarray(Y), batches(steps)

    def step() -> Any:
        nonlocal parameters, state
        indices = following()
        parameters, state, value = update(parameters, state, x, y, indices)
        return value  # not waited for: the framework computes while the next batch is taken

    return ps.jax.Model(init, loss), step


def race(make: Callable[[Sequence[int], int], tuple[Any, Plain]], length: Length) -> dict[str, Any]:
    """Return the seconds of every turn, after both have learned as much."""
    model, plain = make(sizes_of(length.hidden), length.steps)
    turns = TakingTurns(model, plain, length.turn)
    examples = length.steps * BATCH
    trainer = ps.Trainer(turns, ps.Adam(1e-3), ps.OneDeviceStrategy(threads=1))
    history = trainer.fit((X[:examples], Y[:examples]), epochs=length.epochs, batch_size=BATCH, verbose=0)
    ours, theirs = (
        history.history["loss"][-1],
        statistics.fmean(turns.losses[-length.steps // length.turn :]),
    )  # each of the last epoch
    if not ours < turns.losses[0] * 0.9 or abs(ours - theirs) > 0.5 * theirs:
        raise RuntimeError(f"the two did not learn the same: losses {ours:.3f} and {theirs:.3f}")
    return {
        "parts_s": parts(model, length),
        "ours_s": turns.ours_s[FIRST:],
        "plain_s": turns.plain_s[FIRST : len(turns.ours_s)],
        "losses": [ours, theirs],
    }


def parts(model: Any, length: Length) -> tuple[float, float]:
    """Return the unavoidable seconds of our steps: of the gradients, of the optimizer; medians of a turn."""
    rows = np.arange(BATCH)
    batch = Batch(0, 0, rows, X[rows], Y[rows])
    values = {
        name: np.array(initial[1] if isinstance(initial, tuple) else initial)
        for name, initial in model.initial_variables().items()
    }
    optimizer = Optimizer(ps.Adam(1e-3))
    gradient = np.zeros(sum(value.size for value in values.values()), np.float32)
    weights, slots = gradient.copy(), {slot: gradient.copy() for slot in optimizer.slots}
    times_s: list[Times] = []
    for t in range(1, 10 * length.turn):
        began_s = time.process_time()
        _, gradients = model.loss_and_gradients(values, batch, np)
        for found in gradients.values():
            np.asarray(found)  # waits for it
        between_s = time.process_time()
        optimizer.update(weights, gradient, slots, t=t, scale=1.0, variable=Variable("all", (1,)))
        times_s.append((between_s - began_s, time.process_time() - between_s))
    computing_s, updating_s = (statistics.median(kind) for kind in zip(*times_s[length.turn :], strict=True))
    return computing_s, updating_s


def row_of_turns(
    name: str, make: Callable[[Sequence[int], int], tuple[Any, Plain]], length: Length
) -> tuple[list[str], dict[str, Any]]:
    """Return the row of a framework whose own loop takes turns with ours, and its figures."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the run's folder is made there
        try:
            found = race(make, length)
        finally:
            os.chdir(home)
    turns = list(zip(found["plain_s"], found["ours_s"], strict=True))
    clock, processor = ([plain[kind] / ours[kind] for plain, ours in turns] for kind in (0, 1))
    steps_ms = [
        f"{1e3 * statistics.median(one[1] for one in found[key]) / length.turn:.2f}" for key in ("plain_s", "ours_s")
    ]
    figures = {**found, "ratio": statistics.median(processor), "ratio_by_clock": statistics.median(clock)}
    alone_ms = " + ".join(f"{1e3 * part_s:.2f}" for part_s in found["parts_s"])
    return [name, _widths(length), *steps_ms, alone_ms, spread(processor), spread(clock), f"{TARGETS[name]}"], figures


def row_of_keras(length: Length, rounds: int) -> tuple[list[str], dict[str, Any]]:
    """Return the row of Keras' own `fit` and ours, and their examples per second."""
    words = ("--hidden", *map(str, length.hidden), "--steps", str(length.keras_steps))
    turns = [(run("keras", "alone", *words), run("keras", "one_device", *words)) for _ in range(rounds)]
    ratios = [ours / plain for plain, ours in turns]
    steps_ms = [f"{1e3 * BATCH / statistics.median(rates):.2f}" for rates in zip(*turns, strict=True)]
    row = [KERAS, _widths(length), *steps_ms, "", "", spread(ratios), f"{TARGETS[KERAS]}"]
    return row, {"examples_per_s": turns, "ratio_by_clock": statistics.median(ratios)}


def _widths(length: Length) -> str:
    return "-".join(map(str, length.hidden))


def main() -> None:
    """Race, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/frameworks_one_device.md")
    parser.add_argument("--rounds", type=int, default=5, help="turns of Keras (default: %(default)s)")
    asked = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before XLA makes its threads
    rows, figures = [], {}
    for length in LENGTHS:
        found = {name: row_of_turns(name, make, length) for name, make in (("PyTorch", pytorch), ("JAX", jax))}
        found[KERAS] = row_of_keras(length, asked.rounds)
        for name, (row, of_row) in found.items():
            rows.append(row)
            figures[f"{name} {_widths(length)}"] = of_row
    header = [
        "framework",
        "hidden layers",
        "a step alone, ms",
        "of fit, ms",
        "its gradients + Adam, ms",
        "speed of ours over alone, processor",
        "clock",
        "goal",
    ]
    text = table(header, rows)
    print(text)
    if asked.write:
        write("frameworks_one_device", {"OneDeviceStrategy and the framework alone": text}, figures)


if __name__ == "__main__":
    main()
