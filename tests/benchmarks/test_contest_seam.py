"""What contestants answer, that they are caught when they cheat, and that nothing of them is left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import mnist, seam
from benchmarks.peers.environments import python_of
from benchmarks.races.contestants import Contestant, Running, in_turns
from parashard.errors import ConfigurationError, JobFailed
from support.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"size_bytes": 4096, "repeats": 5}
ENDLESS_S = 3600


class Fake(seam.PushPull):
    """A contestant in one process; `lost` says which push, by number, it does not apply."""

    def __init__(self, lost: int = -1) -> None:
        self.lost = lost
        self.opened: list[int] = []

    def open(self, gradient: seam.Floats) -> None:
        self.opened.append(gradient.nbytes)
        self.gradient, self.weights, self.pushes = gradient, np.zeros_like(gradient), 0

    def push(self) -> None:
        if self.pushes != self.lost:
            self.weights -= np.float32(seam.LEARNING_RATE) * self.gradient
        self.pushes += 1

    def pull(self) -> seam.Floats:
        return self.weights.copy()


class TestPushPull:
    def test_a_round_has_as_many_times_of_each_as_asked_for(self) -> None:
        answer = seam.push_pull_answers(Fake())(SMALL)

        assert [len(answer[name]) for name in ("push_ms", "pull_ms", "both_ms")] == [5, 5, 5]
        assert answer["both_ms"][0] == answer["push_ms"][0] + answer["pull_ms"][0]

    def test_weights_live_on_until_another_size_is_asked_for(self) -> None:
        fake = Fake()
        answers = seam.push_pull_answers(fake)

        for request in (SMALL, SMALL, {**SMALL, "size_bytes": 8192}, SMALL):
            assert answers(request)["pushes"] == seam.WARM_UPS + SMALL["repeats"]

        assert fake.opened == [4096, 8192, 4096]

    @pytest.mark.parametrize("lost", [0, 7, 8, 15])
    def test_a_lost_push_is_seen_in_its_round(self, lost: int) -> None:
        answers = seam.push_pull_answers(Fake(lost))
        for _ in range(lost // 8):
            answers(SMALL)

        with pytest.raises(AssertionError, match="1,024 of 1,024 weights are not what 8 pushes"):
            answers(SMALL)

    def test_one_lost_push_of_10000_is_seen_and_rounding_is_not(self) -> None:
        gradient = seam.gradient_of(64)
        weights = np.zeros_like(gradient)
        for _ in range(50):
            before = weights.copy()
            for _ in range(200):
                weights -= np.float32(seam.LEARNING_RATE) * gradient
            seam.check(before, weights, gradient, 200)

        with pytest.raises(AssertionError):
            seam.check(before, weights, gradient, 201)

    def test_one_wrong_weight_is_seen(self) -> None:
        gradient = seam.gradient_of(64)
        weights = np.float32(-seam.LEARNING_RATE) * gradient
        weights[63] = 0

        with pytest.raises(AssertionError, match="1 of 64 weights"):
            seam.check(np.zeros_like(gradient), weights, gradient, 1)


class Learner(seam.Training):
    """Is a tenth better after each part of an epoch of 10 steps, of which each takes a second."""

    batch = 2

    def begin(self, seed: int, epochs: int) -> int:
        self.steps: list[int] = []
        return 10

    def train(self, start: int, stop: int) -> float:
        self.steps += range(start, stop)
        return float(stop - start)

    def accuracy(self) -> float:
        return len(self.steps) / 100


class TestTraining:
    def test_every_step_is_taken_once_whatever_the_parts(self) -> None:
        learner = Learner()

        answer = seam.training_answers(learner)({"epochs": 2, "parts": 4, "target": 0.12, "seed": 0})

        assert learner.steps == list(range(20))
        assert answer == {"examples_per_s": 2.0, "to_target_s": 12.0, "accuracy": 0.2}

    def test_a_target_that_is_never_reached_has_no_time(self) -> None:
        answer = seam.training_answers(Learner())({"epochs": 1, "parts": 1, "target": 0.97, "seed": 0})

        assert answer["to_target_s"] is None


def program(body: str) -> Contestant:
    """Return a contestant of a few lines."""
    return Contestant("fake", (sys.executable, "-c", f"import os, sys, time\n{body}"))


HELLO = 'print(\'{"versions": {"fake": "1"}}\', flush=True)'
ECHO = f"{HELLO}\nfor line in sys.stdin: print(line, end='', flush=True)"

FORKED = f"""
import os, sys, time
child = os.fork()
if child:
    print(f'{{{{"versions": {{{{"pid": "{{child}}"}}}}}}}}', flush=True)
time.sleep({ENDLESS_S})
"""


class TestRunning:
    def test_contestants_take_turns(self) -> None:
        first, second = program(ECHO), Contestant("other", program(ECHO).words)

        answers, versions = in_turns([first, second], [{"n": 1}, {"n": 2}], rounds=3)

        assert answers == {name: [[{"n": 1}] * 3, [{"n": 2}] * 3] for name in ("fake", "other")}
        assert versions["other"] == {"fake": "1"}

    def test_one_that_ends_is_named(self) -> None:
        with Running(program(HELLO)) as running, pytest.raises(JobFailed, match="fake"):
            running.ask({})

    def test_one_that_is_silent_is_killed_with_its_children(self) -> None:
        with Running(Contestant("fake", (sys.executable, "-c", FORKED))) as running:
            with pytest.raises(JobFailed, match="no answer"):
                running.ask({}, deadline_s=0.01)

            child = int(running.versions["pid"])

        assert not runs(child)

    def test_the_environment_is_added_to_ours(self) -> None:
        body = (
            "import json\nprint(json.dumps({'versions': {'x': os.environ['X'], 'p': os.environ['PATH']}}), flush=True)"
        )
        with Running(Contestant("fake", program(body).words, {"X": "1"})) as running:
            assert running.versions == {"x": "1", "p": os.environ["PATH"]}

    def test_a_server_dies_with_its_contestant(self) -> None:
        body = (
            "import sys, time; from benchmarks.peers import seam\n"
            f"started = seam.start([sys.executable, '-c', 'import time; time.sleep({ENDLESS_S})'])\n"
            f"print(started.pid, flush=True); time.sleep({ENDLESS_S})"
        )
        parent = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert parent.stdout is not None
        with parent:
            child = int(parent.stdout.readline())
            parent.kill()

        assert not runs(child)

    def test_whatever_a_contestant_left_dies_with_the_race(self) -> None:
        body = (
            "import sys, time; from benchmarks.races.contestants import Contestant, Running\n"
            f"running = Running(Contestant('fake', (sys.executable, '-c', {FORKED!r})))\n"
            f"print(running.versions['pid'], flush=True); time.sleep({ENDLESS_S})"
        )
        race = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert race.stdout is not None
        with race:
            child = int(race.stdout.readline())
            race.kill()

        assert not runs(child)


def runs(pid: int) -> bool:
    """Tell whether a process that was just killed, and is not ours to wait for, is more than a zombie; kill it then."""
    descriptor = None
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
    if descriptor is None:
        return False
    with os.fdopen(descriptor) as process:
        ended = bool(select.select([process], [], [], DEADLINE_S)[0])
    if not ended:
        os.kill(pid, signal.SIGKILL)
    return not ended


class TestEnvironments:
    def test_a_missing_environment_is_named_with_what_makes_it(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"benchmarks\.peers\.environments ray"):
            python_of(tmp_path, "ray")

    def test_every_requirement_is_pinned(self) -> None:
        files = sorted((ROOT / "benchmarks" / "peers" / "requirements").glob("*.txt"))

        assert [path.stem for path in files] == ["flight", "grpc", "ray", "tensorflow", "torch"]
        assert all("==" in line for path in files for line in path.read_text().split())


class TestMnist:
    def test_the_header_is_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "train-images-idx3-ubyte").write_bytes(bytes(16) + bytes(range(2)) * 784)
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(bytes(8) + b"\x03\x07")

        images, labels = mnist.load(tmp_path, "train")

        assert (images.shape, images[0, :3].tolist(), labels.tolist()) == ((2, 784), [0, 1, 0], [3, 7])
