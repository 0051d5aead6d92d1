"""A script's calls: answered in a worker, refused where they differ, and what cannot be run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn

import pytest

import parashard
from parashard.api.backends import OnCluster
from parashard.api.script import CALLS_FILE, Script, _folder_before
from parashard.api.strategies import MultiWorkerMirroredStrategy
from parashard.errors import BadData, ConfigurationError, JobFailed
from parashard.job.sections import JobOptions
from parashard.launch.local_cluster import WORKER_ARGUMENTS
from parashard.process.starts import WorkerStart
from support.command_run import ROOT
from support.waiting import DEADLINE_S


class Ended(BaseException):
    """The process has ended: nothing of the script can catch it."""


def worker(folder: Path, *results: dict[str, object]) -> Script:
    (folder / CALLS_FILE).write_text(json.dumps(results))
    return Script(WorkerStart(connect=str(folder), name="worker-3"))


@pytest.fixture(autouse=True)
def own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("atexit.register", lambda function: None)

    def ended(script: Script, says: str) -> NoReturn:
        raise Ended(says)

    monkeypatch.setattr(Script, "_end", ended)


def test_the_parent_makes_every_call() -> None:
    script = Script(None)
    for kind in ("evaluate", "fit"):
        with script.call(kind) as result:
            assert result == {}
    assert not script.is_worker


def test_a_worker_s_earlier_calls_are_answered_and_its_own_is_made(tmp_path: Path) -> None:
    parent = Script(None)
    for kind, returned in (("fit", {"run_dir": "runs/a"}), ("evaluate", {"metrics": {"loss": 0.5}})):
        with parent.call(kind) as result:
            result.update(returned)
    with parent.call("fit"):
        parent.write_results(tmp_path)
    script = Script(WorkerStart(connect=str(tmp_path), name="worker-0"))
    with script.call("fit") as result:
        assert result == {"call": "fit", "run_dir": "runs/a"}
    with script.call("evaluate") as result:
        assert result == {"call": "evaluate", "metrics": {"loss": 0.5}}
    with script.call("fit") as result:
        assert result == {}


@pytest.mark.parametrize("error", [ConfigurationError, BadData, JobFailed, KeyboardInterrupt])
def test_what_a_call_raised_it_raises_in_a_worker_of_a_later_one(tmp_path: Path, error: type[BaseException]) -> None:
    parent = Script(None)
    with pytest.raises(error), parent.call("fit"):
        raise error("no such rate")
    parent.write_results(tmp_path)
    script = Script(WorkerStart(connect=str(tmp_path), name="worker-0"))
    with pytest.raises(error, match="no such rate"), script.call("fit"):
        pytest.fail("it is not made again")
    with script.call("fit") as result:
        assert result == {}


def test_another_order_of_calls_is_refused(tmp_path: Path) -> None:
    says = "is evaluate in this worker and fit in the process that started it"
    for script in (worker(tmp_path, {"call": "fit"}), worker(tmp_path)):
        with pytest.raises(Ended, match=says), script.call("evaluate"):
            pass


def test_what_a_worker_s_own_call_raises_ends_it_whatever_the_script_would_make_of_it(tmp_path: Path) -> None:
    with pytest.raises(Ended, match="no such rate"), worker(tmp_path).call("fit"):
        raise ConfigurationError("no such rate")


def test_a_script_is_started_by_its_own_path_wherever_it_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.py"
    file.touch()
    monkeypatch.setattr(sys, "argv", ["sub/train.py", "train.py"])
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-u", "sub/train.py", "train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    script = Script(None)
    script._file = str(file)
    assert script.command.words == (sys.executable, "-u", str(file), "train.py")


@pytest.mark.parametrize(
    ("module", "file", "variables", "folder"),
    [
        ("package.train", "/start/package/train.py", "", "/start"),
        ("package.__main__", "/start/package/__main__.py", "", "/start"),
        ("train", "/start/train.py", "", "/start"),
        ("package.train", "/elsewhere/package/train.py", "", "/elsewhere"),  # it left the folder, then imported us
        ("package.train", "/start/src/package/train.py", "src", "/start"),
        ("package.train", "/env/lib/site-packages/package/train.py", "", "/start"),
        ("__main__", "/start/folder/__main__.py", "", "/start"),
    ],
)
def test_a_module_is_started_in_the_folder_that_it_was_started_in(
    monkeypatch: pytest.MonkeyPatch, module: str, file: str, variables: str, folder: str
) -> None:
    monkeypatch.setattr(parashard._started, "folder", "/start")
    monkeypatch.setenv("PYTHONPATH", variables)
    monkeypatch.setattr(sys, "path", ["/start/lib", *sys.path])  # inserted by the script
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", module, "1"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(module, None, origin=file))
    assert Script(None).command[:2] == ((sys.executable, "-m", module, "1"), folder)


@pytest.mark.parametrize(("named", "folder"), [("train.py", "/a/b"), ("b/train.py", "/a"), ("/a/b/train.py", "/start")])
def test_a_script_is_started_where_it_was_started_though_it_went_elsewhere_before_its_imports(
    monkeypatch: pytest.MonkeyPatch, named: str, folder: str
) -> None:
    monkeypatch.setattr(parashard._started, "folder", "/start")
    assert _folder_before("/a/b/train.py", named) == folder


PROGRAM = """
import numpy as np
import parashard as ps
class Model:
    def initial_variables(self): return {"w": np.zeros((2, 1), np.float32)}
    def loss_and_gradients(self, variables, batch, xp): return 0.5, {"w": np.zeros((2, 1), np.float32)}
    def evaluate(self, variables, batch, xp): return {"loss": 0.5}
ps.Trainer(Model()).fit((np.zeros((4, 2)), np.zeros(4)), verbose=0)
"""


def said(command: list[str], text: str, folder: Path, **environment: str) -> str:
    environ = {**os.environ, "PYTHONPATH": ":".join([str(ROOT), *(p for p in sys.path if p)]), **environment}
    done = subprocess.run(
        command, input=text, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode
    assert not (folder / "runs").exists()
    return done.stderr.splitlines()[-1]


def test_what_is_in_no_file_cannot_be_run_again(tmp_path: Path) -> None:
    strategy = 'ps.ParameterServerStrategy(workers_as="processes")'
    text = PROGRAM.replace("ps.Trainer(Model())", f"ps.Trainer(Model(), strategy={strategy})")
    assert text != PROGRAM
    assert "python -c has none: write these lines into a file" in said([sys.executable, "-c", text], "", tmp_path)
    coordinator = "import parashard as ps\nps.Coordinator(variables={'w': [0.0]})"
    assert "an interactive session has none" in said([sys.executable], coordinator, tmp_path)


def test_a_child_of_multiprocessing_is_told_of_the_guard(tmp_path: Path) -> None:
    children = """
import multiprocessing
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start(); child.join()
    raise SystemExit(child.exitcode)
"""
    (tmp_path / "train.py").write_text(children + PROGRAM)
    assert 'under `if __name__ == "__main__":`' in said([sys.executable, "train.py"], "", tmp_path)


def test_children_of_a_worker_do_not_take_themselves_for_it(tmp_path: Path) -> None:
    (tmp_path / CALLS_FILE).write_text("[]")
    text = "import os, parashard as ps\nprint(ps.is_worker(), os.environ.get(NAME))\nos._exit(0)"
    text = text.replace("NAME", repr(WORKER_ARGUMENTS))
    arguments = json.dumps(["--connect", str(tmp_path), "--name", "worker-0"])
    environ = {**os.environ, WORKER_ARGUMENTS: arguments, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-u", "-c", text], env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.stdout == "True None\n", done.stderr


@pytest.mark.parametrize("workers_as", [None, "processes", "threads"])
def test_workers_are_threads_where_they_are_asked_for_or_there_is_no_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers_as: str | None
) -> None:
    script = Script(None)
    monkeypatch.setattr("parashard.api.backends.SCRIPT", script)
    place = OnCluster(MultiWorkerMirroredStrategy(workers_as=workers_as))
    script._file = None
    assert place.runs_script is (workers_as == "processes")
    script._file = str(tmp_path / "train.py")
    (tmp_path / "train.py").touch()
    assert place.runs_script is (workers_as != "threads")
    script._file = None
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "from multiprocessing.spawn import spawn_main"])
    assert place.runs_script is (workers_as != "threads"), "a child of multiprocessing is told what its script lacks"


def test_a_thread_starts_no_processes() -> None:
    with ThreadPoolExecutor(1) as threads, pytest.raises(ConfigurationError, match="from the script's main thread"):
        threads.submit(lambda: Script(None).command).result()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("train.py", "train"),
        ("My train (2).py", "My-train-2"),
        ("_train.py", "train"),
        ("täglich.py", "taglich"),
        ("训练.py", "script"),
        ("package/__main__.py", "package"),
        ("a" * 100 + ".py", "a" * 80),
    ],
)
def test_a_job_has_a_name_whatever_its_script_is_called(tmp_path: Path, file: str, name: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    script = Script(None)
    script._file = str(path)
    assert script.job_name == name
    assert JobOptions(name=name, epochs=1, batch_size=1).name == name, "a job file may have it"
