"""Workers that are threads of this process, which has no script: what they compute, how they end, what they leave."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl

import parashard as ps
from parashard.api import backends, fits
from parashard.api import trainer as module
from parashard.api.backends import LOG_FILE
from parashard.api.script import Script
from parashard.process import failpoints
from parashard.process.run_files import LOGS
from support.report_oracle import store_of, unsaved
from support.waiting import DEADLINE_S, eventually

EXAMPLES, EPOCHS, SIZE = 60, 5, 4
STEPS = EPOCHS * EXAMPLES // SIZE
DATA = np.arange(EXAMPLES)[:, None], np.zeros(EXAMPLES, np.float32)

MORE = pytest.mark.full("a real cluster each; how a thread ends is in tests/parashard/process/test_thread_child.py")


class Ledger:
    """Counts each example of each epoch; what a test does in a step is `at`, which all copies share."""

    def __init__(self, at: Any = None) -> None:
        self.at = at
        self.users: set[int] = set()

    def for_thread(self) -> Ledger:
        """Return another one: `at` is of the test."""
        return Ledger(self.at)

    def initial_variables(self) -> Mapping[str, Any]:
        return {"counts": np.zeros(EXAMPLES, np.float32)}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        self.users.add(threading.get_ident())
        assert len(self.users) == 1, "each worker has a model of its own"
        if self.at is not None:
            self.at(batch.step)
        gradient = np.zeros(EXAMPLES, np.float32)
        gradient[batch.inputs[:, 0]] = -1.0
        return 0.5, {"counts": gradient}

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Mapping[str, float]:
        counts = variables["counts"]
        return {"loss": 0.0, "least": float(counts.min()), "most": float(counts.max())}


class Once:
    """Does something in the first attempt at a step, and in no other."""

    def __init__(self, step: int, do: Any) -> None:
        self.step, self.do = step, do
        self.done = False

    def __call__(self, step: int) -> None:
        if step == self.step and not self.done:
            self.done = True
            self.do()


def left() -> tuple[set[str], int, int]:
    """Return this process's threads, children and blocks of shared memory."""
    threads = {thread.name for thread in threading.enumerate()}
    children = sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists() or path.is_symlink()]
    return threads, children, sum(link.startswith("/memfd:") for link in links)


@pytest.fixture(autouse=True)
def no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run where pytest is no script, and find afterwards what was there before."""
    monkeypatch.chdir(tmp_path)
    script = Script(None)
    for user in (module, fits, backends):
        monkeypatch.setattr(user, "SCRIPT", script)
    before = left()
    yield

    def nothing_is_left() -> bool:
        gc.collect()
        threads, *others = left()
        # What an earlier test left may end meanwhile, too.
        return threads <= before[0] and all(now <= was for now, was in zip(others, before[1:], strict=True))

    eventually(nothing_is_left, f"nothing is left beyond {before}", told=left)


def trainer(model: Ledger, workers: int = 2, **settings: Any) -> ps.Trainer:
    strategy = ps.ParameterServerStrategy(2, workers, "async")  # test_same_bits.py has threads in rounds
    keys = {"checkpoint.every_s": 0.2, "consistency.reduce": "sum", "cluster.restart_backoff_s": 0.01}
    return ps.Trainer(model, ps.SGD(1.0), strategy, settings={**keys, **settings})


def fit(trainer: ps.Trainer, **arguments: Any) -> ps.History:
    history = trainer.fit(DATA, **{"epochs": EPOCHS, "batch_size": SIZE, "verbose": 0, **arguments})
    assert unsaved(store_of(history.run_dir), history.report) == []
    told = trainer.evaluate(DATA)
    assert (told["least"], told["most"]) == (EPOCHS, EPOCHS), "each example of each epoch is in once"
    return history


def test_workers_of_a_process_without_a_script_are_its_threads() -> None:
    seen: set[str] = set()
    history = fit(trainer(Ledger(lambda step: seen.add(threading.current_thread().name))))
    assert seen <= {"parashard-worker-0", "parashard-worker-1"}
    assert seen
    assert history.report["workers"] == 2
    assert sorted(path.name for path in (history.run_dir / LOGS).iterdir()) == [
        "coordinator.log",
        "fork-server.log",
        "shard-0.log",
        "shard-1.log",
        LOG_FILE,
    ]


@MORE
@pytest.mark.parametrize(
    "fault",
    [
        "worker.compute.done=error@5",
        pytest.param(
            "worker.lease.granted=error@3",
            marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
        ),
    ],
)
def test_a_worker_whose_thread_dies_is_started_again_and_its_leases_are_given_to_others(
    tmp_path: Path, fault: str
) -> None:
    folder = tmp_path / "fired"
    folder.mkdir()
    failpoints.arm({failpoints.SPEC_VARIABLE: fault, failpoints.FOLDER_VARIABLE: str(folder)})
    try:
        history = fit(trainer(Ledger()))
    finally:
        failpoints.arm({})
    assert failpoints.firings(folder)[fault.partition("=")[0]] == 1
    assert history.report["worker_restarts"] == 1


@MORE
def test_a_step_that_hangs_is_given_up_and_computed_by_another_thread() -> None:
    returned = threading.Event()
    hangs = Ledger(Once(7, lambda: returned.wait(DEADLINE_S)))
    try:
        history = fit(trainer(hangs, workers=1, **{"cluster.step_timeout_s": 0.5, "cluster.grace_s": 0.5}))
        assert "parashard-worker-0" in {thread.name for thread in threading.enumerate()}, "a thread cannot be ended"
    finally:
        returned.set()
    assert history.report["worker_restarts"] == 1
    logs = history.run_dir / LOGS
    assert "event=hung" in (logs / LOG_FILE).read_text()
    assert "worker-0 ended: step 7 has taken over" in (logs / "coordinator.log").read_text(), "not killed as silent"


@MORE
def test_a_transform_that_hangs_fails_the_job_as_in_a_process() -> None:
    returned = threading.Event()

    def hangs(example: Any, rng: Any) -> Any:
        if threading.current_thread().name.startswith("parashard-"):
            returned.wait(DEADLINE_S)
        return example

    settings = {"cluster.step_timeout_s": 0.5, "cluster.grace_s": 0.5, "job.max_attempts": 2}
    try:
        with pytest.raises(ps.JobFailed, match="has taken over"):
            trainer(Ledger(), **settings).fit(DATA, transform=hangs, epochs=1, batch_size=SIZE, verbose=0)
    finally:
        returned.set()


def raised(step: int) -> None:
    if step == 9:
        raise KeyError("no such row")


@MORE
def test_what_a_model_raises_is_told_once_with_its_line_and_its_worker() -> None:
    with pytest.raises(ps.JobFailed, match=r"worker-[01]") as failed:
        fit(trainer(Ledger(raised), **{"job.max_attempts": 2}))
    says = str(failed.value)
    assert says.count("test_worker_threads.py:") == says.count("KeyError: 'no such row'") == 1, says
    (log,) = Path.cwd().glob(f"runs/*/{LOGS}/{LOG_FILE}")
    assert "raise KeyError" in log.read_text()


@MORE
def test_after_ctrl_c_it_goes_on() -> None:
    model = Ledger(Once(30, lambda: os.kill(os.getpid(), signal.SIGINT)))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"stopped at step .*\. Continue: fit\(\.\.\., resume=True\)$"):
        fit(trainer(model))
    assert signal.getsignal(signal.SIGINT) is handler
    fit(trainer(Ledger()), resume=True)
    assert len(list(Path.cwd().glob("runs/*"))) == 1


@MORE
def test_the_process_is_as_it_was() -> None:
    def drawn(step: int) -> None:
        random.seed(step)
        np.random.seed(step)

    def state() -> Any:
        threads = [(pool["filepath"], pool["num_threads"]) for pool in threadpoolctl.threadpool_info()]
        return random.getstate(), np.random.get_state()[1].tolist(), threads  # type: ignore[index,union-attr]

    before = state()
    fit(trainer(Ledger(drawn), **{"cluster.worker_threads": 3}))
    assert state() == before


class Locked(Ledger):
    """One that cannot be copied."""

    for_thread = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_what_no_thread_can_have_is_refused_before_there_is_a_run() -> None:
    with pytest.raises(ps.ConfigurationError, match="and Locked cannot be copied: TypeError: cannot pickle"):
        fit(trainer(Locked()))
    refused: list[BaseException] = []

    def elsewhere() -> None:
        try:
            fit(trainer(Ledger()))
        except ps.ConfigurationError as error:
            refused.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(DEADLINE_S)
    assert "from the script's main thread" in str(refused[0])
    assert not Path("runs").exists()
