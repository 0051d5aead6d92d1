"""The running script: whether it is a worker, recorded results of its calls, and the command to run it again.

A worker is the same script run again, with the same command in the same folder. Calls of trainers are numbered in the
order in which the script makes them. In a worker for call k, earlier calls return results that the parent recorded in
the run folder; call k runs the worker, and then the process exits.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import shlex
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import parashard
from parashard.api.code import Sources
from parashard.errors import BadData, ConfigurationError, JobFailed
from parashard.job.sections import job_name_from
from parashard.launch.local_cluster import WORKER_IS_SCRIPT, ScriptCommand
from parashard.launch.programs import Program, ResumeFlags, answers_in, process_began, read_resume_flags
from parashard.launch.run_folders import run_named
from parashard.models.user_errors import named_with_line
from parashard.process.durable import write_durably
from parashard.process.run_files import CALLS_FILE
from parashard.process.shell import ExitCode, end_process
from parashard.process.starts import WorkerStart

if TYPE_CHECKING:
    from parashard.data.base import DataSource
    from parashard.job.schema import Job
    from parashard.models.base import Model

COORDINATOR = "ps.Coordinator"
"""The call that makes a worker execute scheduled functions."""
CALLS = "calls"
"""The folder of scheduled calls in a run folder; only runs of a `ps.Coordinator` have one."""

_ERRORS: Mapping[str, type[BaseException]] = {
    "BadData": BadData,
    "ConfigurationError": ConfigurationError,
    "KeyboardInterrupt": KeyboardInterrupt,
}


class Script:
    """This process's script."""

    def __init__(self, start: WorkerStart | None) -> None:
        self.begin(start)

    def begin(self, start: WorkerStart | None) -> None:
        """Initialise; again in a forked process."""
        self.is_worker = start is not None
        self._named, self._shown = sys.argv[0], shlex.join(sys.argv)
        self._file: str | None = getattr(sys.modules["__main__"], "__file__", None)  # kept: removed at the script's end
        self._start = start
        self.results: list[dict[str, Any]] = []  # results or errors of the calls so far
        self._calls = 0
        self._last = False
        self._within = False
        self._sources: Sources | None = None
        if self.is_worker:
            if self.run_dir is not None:
                self.results = answers_in(self.run_dir)
            sys.excepthook = self._raised
            atexit.register(self._ended_early)

    @property
    def run_dir(self) -> Path | None:
        """This worker's run folder; None in other processes, and if the worker only has the coordinator's address."""
        return Path(self._start.connect) if self._start is not None and Path(self._start.connect).is_dir() else None

    @property
    def _own_call(self) -> str:
        """The kind of call that this worker runs in."""
        return COORDINATOR if self.run_dir is not None and (self.run_dir / CALLS).is_dir() else "fit"

    @contextmanager
    def call(self, kind: str) -> Iterator[dict[str, Any]]:
        """Number a call and yield its result, empty if the caller must compute it; a worker exits if calls differ."""
        if self._within:
            if kind == "fit":
                raise ConfigurationError("fit is called within a fit, by a callback: a script's fits come one by one")
            yield {}  # a callback's call, which only the parent makes
            return
        if self._last and kind != "evaluate":
            raise ConfigurationError(f"{kind} after ps.Coordinator(...): a script has one, and no fit after it")
        self._last = kind == COORDINATOR
        self._calls += 1
        result = self._result_of(kind)
        if "error" in result:
            raise_again(result)
        try:
            self._within = True
            yield result
        except BaseException as error:
            if self.is_worker and not result:
                self._fail(type(error), error, error.__traceback__)  # now: the script might catch the error
            self.results.append({"call": kind, "error": type(error).__name__, "says": str(error)})
            raise
        finally:
            self._within = False
        if not self.is_worker:
            self.results.append({**result, "call": kind})

    def _result_of(self, kind: str) -> dict[str, Any]:
        """Return the current call's result in the parent; empty if this process must compute it."""
        if not self.is_worker or self.run_dir is None:  # without the folder, only the coordinator can compare calls
            return {}
        results = [*self.results, {"call": self._own_call}][: self._calls]
        due = results[-1]["call"]
        if due != kind:
            self._end(
                f"call {self._calls} of {self._name} is {kind} in this worker and {due} in the process that started "
                "it: a script makes the same calls wherever it runs"
            )
        return self.results[self._calls - 1] if self._calls <= len(self.results) else {}

    @property
    def worker_name(self) -> str:
        """This worker's name; "" for the next free one."""
        return self._start.name if self._start is not None else ""

    def write_results(self, run_dir: Path) -> None:
        """Write results of the calls so far for the workers of the next call."""
        write_durably(run_dir / CALLS_FILE, json.dumps(self.results).encode())

    def work(
        self,
        model: Model,
        source: DataSource,
        model_sha256: str,
        check: Callable[[Job], None] | None = None,
    ) -> NoReturn:
        """Run this process's worker, then exit; `check` raises if the coordinator's job differs from this call's."""
        from parashard_worker.__main__ import main
        from parashard_worker.loading import OwnTask

        atexit.unregister(self._ended_early)
        assert self._start is not None, "the script's parent is no worker"
        end_process(main(self._start, OwnTask(model, source, model_sha256, check)))

    @property
    def _name(self) -> str:
        return Path(self._file or "the script").name

    @property
    def job_name(self) -> str:
        """The name of the script's jobs: the file's, or for `__main__.py` its package's or folder's."""
        path = self.path
        name = path.parent.name if path.stem == "__main__" else path.stem
        return job_name_from(name, "script")

    @property
    def path(self) -> Path:
        """The script's file; raise ConfigurationError if there is no file that a worker could run."""
        if self._is_child:
            raise ConfigurationError(
                "this process is a child that multiprocessing started, and it runs the script once more: put what the "
                'script does under `if __name__ == "__main__":`'
            )
        if self._file is None or not Path(parashard._started.folder, self._file).is_file():
            how = "python -c" if "-c" in sys.orig_argv[1:2] else "an interactive session"
            raise ConfigurationError(
                f"a worker is the script run again, and {how} has none: write these lines into a file and run it"
            )
        if Path(self._file).parent.name == "pytest" or Path(self._file).name in ("pytest", "py.test"):
            raise ConfigurationError(
                "a worker is the script run again, which pytest is not: run a script from the test"
            )
        return Path(parashard._started.folder, self._file)

    @property
    def _is_child(self) -> bool:
        """Whether multiprocessing started this process, which imports the script again."""
        return multiprocessing.parent_process() is not None or any(
            word.startswith("from multiprocessing.") for word in sys.orig_argv
        )

    @property
    def has_file(self) -> bool:
        """Whether there is a `path`."""
        try:
            return bool(self.path)
        except ConfigurationError:
            return False

    @property
    def is_interactive(self) -> bool:
        """Whether this is a notebook, an interactive session, `python -c` or pytest rather than a script."""
        return not self.has_file and not self._is_child

    def program(self, call: str) -> Program:
        """Return the record of this program for the run of a call."""
        pid = os.getpid()
        if not self.has_file:
            return Program(call, pid=pid, began=process_began(pid))
        command = self._command
        return Program(call, str(self.path), command.words, command.folder, pid, process_began(pid))

    def check_thread(self) -> None:
        """Raise ConfigurationError outside the main thread, which receives Ctrl-C and then saves the run."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "processes are started from the script's main thread: call fit there, or take a strategy of this "
                "process, such as ps.OneDeviceStrategy()"
            )

    @property
    def command(self) -> ScriptCommand:
        """The command that runs the script again; raise ConfigurationError outside the main thread."""
        self.check_thread()
        return self._command

    @property
    def _command(self) -> ScriptCommand:
        words = [sys.executable, *sys.orig_argv[1:]]
        if sys.modules["__main__"].__spec__ is not None:  # python -m
            return ScriptCommand(tuple(words), _folder_of_package(parashard._started.folder))
        if self._named in words[1:]:
            words[words.index(self._named, 1)] = str(self.path)  # absolute: the script may have changed its folder
        return ScriptCommand(tuple(words), _folder_before(str(self.path), self._named), self._shown)

    @property
    def is_resumed(self) -> bool:
        """Whether this program was started to resume a run, whatever its calls' `resume` is."""
        return parashard._started.resume not in ("", "0")

    @property
    def asked_run(self) -> Path | None:
        """The run that the program was asked to resume; None for any."""
        return run_named(parashard._started.resume) if parashard._started.resume not in ("", "0", "1") else None

    @property
    def resume_flags(self) -> ResumeFlags:
        """Flags of `parashard resume` besides the run."""
        return read_resume_flags(parashard._started.resume_flags)

    @property
    def sources(self) -> Sources:
        """The texts of the script and of the user's own modules, as this process runs them."""
        if self._sources is None:
            text = parashard._started.main_text if self._file == parashard._started.main_file else None
            self._sources = Sources(self.path, text, self._root)
        return self._sources

    @property
    def _root(self) -> Path:
        """The folder that the user's own modules are imported from."""
        package = _package_folder()
        script = self.path.resolve() if self.path.is_symlink() else self.path
        return package if package is not None and package in script.parents else script.parent

    def _raised(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        """End a worker whose script raised before its call; a retry would fail too."""
        self._fail(kind, error, where, f"; {WORKER_IS_SCRIPT}")

    def _fail(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None, advice: str = ""
    ) -> None:
        traceback.print_exception(kind, error, _from_script(where, self._file))
        raised = f"the script raised {named_with_line(error)}{advice}"
        self._end(str(error) if isinstance(error, ConfigurationError) else raised)

    def _ended_early(self) -> None:
        self._end(
            f"{self._name} ended before its call {len(self.results) + 1}, {self._own_call}, which this worker is for: "
            "a script makes the same calls wherever it runs"
        )

    def _end(self, says: str) -> NoReturn:
        print(f"parashard {self.worker_name or 'worker'}: {says}", file=sys.stderr, flush=True)  # noqa: T201  # the launcher shows the last line
        end_process(ExitCode.CONFIGURATION)


def _from_script(where: TracebackType | None, file: str | None) -> TracebackType | None:
    """Return a traceback without the frames before the script's first, which belong to its launcher."""
    script = where
    while script is not None and script.tb_frame.f_code.co_filename != file:
        script = script.tb_next
    return script or where


def _package_folder() -> Path | None:
    """Return the folder that has the module or package of `python -m`; None if the program was started otherwise."""
    spec = sys.modules["__main__"].__spec__
    if spec is None or not spec.origin or spec.name == "__main__":  # `__main__`: a folder or archive was run
        return None
    return Path(spec.origin).absolute().parents[spec.name.count(".")]


def _folder_of_package(known: str) -> str:
    """Return where `python -m` was started; the script may have changed its folder before importing this package."""
    package = _package_folder()
    if package is None or package == Path(known) or package.name in ("site-packages", "dist-packages"):
        return known
    named = [Path(known, folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return known if package in named else str(package)


def _folder_before(path: str, named: str) -> str:
    """Return where a script was started; it may have changed its folder before importing this package."""
    if named and not os.path.isabs(named) and path.endswith(f"{os.sep}{named}"):
        return path.removesuffix(named).rstrip(os.sep) or os.sep
    return parashard._started.folder


def raise_again(result: Mapping[str, Any]) -> NoReturn:
    """Raise the recorded error of a call."""
    raise _ERRORS.get(result["error"], JobFailed)(result["says"])


def worker_start() -> WorkerStart | None:
    """Return the start arguments of this worker; None if this process is not a worker."""
    text = parashard._started.worker_arguments
    return None if text is None else WorkerStart.read(json.loads(text))


SCRIPT = Script(worker_start())


def is_worker() -> bool:
    """Tell whether this process is a worker of the script, whose output goes to its log."""
    return SCRIPT.is_worker
