"""The protocol between a race and its contestants, and how every contestant is timed and checked.

A contestant is a program. It starts its own server and worker, prints {"versions": {...}} on one line, and then answers
each line on standard input, a JSON object, with one on standard output, until its input ends. The standard library and
NumPy only: peers' environments have nothing of ours. Called by the peers' programs and by `benchmarks.races`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

LEARNING_RATE = 0.01
WARM_UPS = 3
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)

Floats = np.ndarray[Any, np.dtype[np.float32]]


class PushPull(ABC):
    """One worker process and one server process: the server applies w -= 0.01 g before it answers a push."""

    @abstractmethod
    def open(self, gradient: Floats) -> None:
        """Create weights of zeros on the server, of the gradient's size; all pushes send this gradient."""

    @abstractmethod
    def push(self) -> None:
        """Return once the server has applied the gradient, which lies in an ordinary array of the worker."""

    @abstractmethod
    def pull(self) -> Floats:
        """Return the weights as the worker holds them."""

    def timed(self, repeats: int) -> tuple[dict[str, list[float]], int]:
        """Push and pull in turn, `repeats` times; return milliseconds of pushes, pulls and both, and the push count.

        Each pull follows a push: a contestant that knows that nothing has changed would send nothing.
        """
        pairs = [(milliseconds(self.push), milliseconds(self.pull)) for _ in range(repeats)]
        pushes, pulls = ([pair[i] for pair in pairs] for i in (0, 1))
        return {"push_ms": pushes, "pull_ms": pulls, "both_ms": [sum(pair) for pair in pairs]}, repeats


class Training(ABC):
    """A network in training, by a contestant's own means, in batches of `batch` examples."""

    batch: int

    @abstractmethod
    def begin(self, seed: int, epochs: int) -> int:
        """Draw new weights, begin the optimizer anew, and return how many steps an epoch has."""

    @abstractmethod
    def train(self, start: int, stop: int) -> float:
        """Take the steps from `start` up to `stop`, and return the seconds that they took."""

    @abstractmethod
    def accuracy(self) -> float:
        """Return the share of test examples that are classified correctly now."""


def milliseconds(operation: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began_s = time.perf_counter()
    operation()
    return 1000 * (time.perf_counter() - began_s)


def push_pull_answers(contestant: PushPull) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the handler of {"size_bytes": n, "repeats": k}: times as `PushPull.timed`, after a check of the weights.

    The weights persist from round to round, until another size is requested.
    """
    gradient = checked = np.empty(0, np.float32)

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal gradient, checked
        if gradient.nbytes != request["size_bytes"]:
            gradient = gradient_of(request["size_bytes"] // 4)
            checked = np.zeros_like(gradient)
            contestant.open(gradient)
        for _ in range(WARM_UPS):  # another contestant has used the caches since the last round
            contestant.push()
            contestant.pull()
        times, timed_pushes = contestant.timed(request["repeats"])
        pushes = WARM_UPS + timed_pushes
        weights = contestant.pull()
        check(checked, weights, gradient, pushes)
        checked = weights.copy()
        return {**times, "pushes": pushes}

    return answer


def training_answers(training: Training) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the handler of {"epochs": n, "parts": k, "target": a, "seed": s}.

    The answer has the examples per second over all epochs, the seconds of training until the test accuracy was first
    `a` (None: never), and the last accuracy; accuracy is measured k times an epoch, while training pauses.
    """

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        steps_per_epoch = training.begin(request["seed"], request["epochs"])
        steps, elapsed_s, to_target_s, accuracy = 0, 0.0, None, 0.0
        for part in range(1, request["epochs"] * request["parts"] + 1):
            until = part * steps_per_epoch // request["parts"]
            elapsed_s += training.train(steps, until)
            steps, accuracy = until, training.accuracy()
            if to_target_s is None and accuracy >= request["target"]:
                to_target_s = elapsed_s
        rate = steps * training.batch / elapsed_s
        return {"examples_per_s": rate, "to_target_s": to_target_s, "accuracy": accuracy}

    return answer


def gradient_of(elements: int) -> Floats:
    """Return a gradient whose values differ from element to element, none of them near 0."""
    return np.random.default_rng(elements).uniform(0.5, 1.5, elements).astype(np.float32)


def check(before: Floats, after: Floats, gradient: Floats, pushes: int) -> None:
    """Raise AssertionError unless this many pushes lead from `before` to `after`, within a third of a push.

    Rounding adds up to less than that for 10,000 pushes, if checked every few hundred.
    """
    assert after.shape == gradient.shape, f"{after.shape} weights, {gradient.shape} gradients"
    assert after.dtype == np.float32, after.dtype
    wrong = np.abs(after - before + LEARNING_RATE * pushes * gradient) > LEARNING_RATE / 3 * gradient
    assert not wrong.any(), f"{wrong.sum():,} of {wrong.size:,} weights are not what {pushes} pushes add up to"


def serve(answer: Callable[[Mapping[str, Any]], Mapping[str, Any]], packages: Iterable[str]) -> None:
    """Print the versions of packages, and answer requests until the input ends.

    Output of libraries goes to standard error.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"versions": {name: version(name) for name in packages}}), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies)


def start(words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process that the kernel kills with this one, however this one ends.

    Parameters
    ----------
    words : sequence of str
        The command.
    **options
        Of `subprocess.Popen`.
    """
    # A call of ctypes and nothing else: no lock that another thread could hold at the fork.
    return subprocess.Popen(words, text=True, preexec_fn=_die_with_parent, **options)  # noqa: PLW1509


def start_server(module: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start `python -m module arguments`, and return it with the first line that it prints: its address."""
    process = start([sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"{module} {' '.join(arguments)} ended before it served"
    return process, line.strip()


def free_port() -> int:
    """Return a port that was free a moment ago, for servers that cannot choose one themselves."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _die_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
