"""Coordinator: schedules functions that workers call; modelled on TensorFlow's `ClusterCoordinator`.

Each scheduled call is a step of a job of open length: it is leased, and its push is applied exactly once, even if
processes are killed. `scheduled` has the worker's side, `calls` transfers values between both, `background` runs the
job.
"""

from __future__ import annotations

import atexit
import builtins
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import numpy as np

from parashard.api.code import RunCode, code_of, write_code
from parashard.api.jobs import check_same_call, checked_optimizer, checked_servers, job_of, plain_tables
from parashard.api.programs.background import BackgroundRun, checked_variables, within
from parashard.api.programs.calls import Calls, Failure, Function, FunctionCall, PerWorker, name_of, names_now
from parashard.api.programs.scheduled import ScheduledFunctions, ScheduledSource
from parashard.api.script import COORDINATOR, SCRIPT
from parashard.api.strategies import PROCESSES, THREADS, ParameterServerStrategy
from parashard.checkpoints.catalogue import Catalogue
from parashard.data.tree import map_leaves
from parashard.errors import ConfigurationError, ParashardError
from parashard.job.embeddings import Table, checked_tables
from parashard.job.load import LoadedJob
from parashard.launch.run_control import RunControl
from parashard.launch.run_folders import new_run_dir
from parashard.launch.runs import Run, job_credentials
from parashard.launch.stopping import restorable_in_all
from parashard.models.declaration import declare
from parashard.plan.intervals import IntervalSet
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.variables import Float32s
from parashard.process.arguments import checked_timeout_s, checked_whole
from parashard.store import open_store

QUEUE = 1024
TIMEOUT_S = 600.0
SWEEP_S = 5.0
KEPT_BYTES_MAX = 4 << 30
"""Most bytes of call arguments that are kept because a restarted shard may need the calls repeated."""
ERRORS_MAX = 100
"""Most errors not yet raised whose text is kept, the first ones."""
_NOT_SET = object()


class FunctionFailed(ParashardError):
    """A scheduled function raised an error or returned an invalid result; the message has the worker and the line.

    The traceback is in the worker's log.

    Attributes
    ----------
    type_name : str
        Name of the error's class, such as "StopIteration"; a built-in error is also the `__cause__`.
    """

    type_name: str = ""


class RemoteValue:
    """The future result of a scheduled function.

    If a worker or shard was killed, the function may have run more than once. Its push is applied once; this is the
    result of one of the runs, which may not be the one that pushed.
    """

    def __init__(self, coordinator: Coordinator, number: int) -> None:
        self._coordinator = coordinator
        self.number = number
        self._value: Any = _NOT_SET

    def fetch(self, timeout_s: float | None = None) -> Any:
        """Wait until the function's push is applied; return its result.

        Raises
        ------
        FunctionFailed
            If the function raised an error.
        JobFailed
            If the job ended first.
        TimeoutError
            If it takes longer than `timeout_s` (default: the coordinator's).
        """
        if self._value is _NOT_SET:
            self._value = self._coordinator._fetched(self.number, timeout_s)
        return self._value

    @property
    def fetched(self) -> bool:
        """Whether the result has already been fetched to this process."""
        return self._value is not _NOT_SET


class Coordinator:
    """Starts a cluster and schedules functions on its workers; at most one per script.

    ::

        with ps.Coordinator(ps.ParameterServerStrategy(workers=4), variables={"w": w}, optimizer=ps.Adam(1e-3)) as it:
            losses = [it.schedule(train_step, args=(i,)) for i in range(1000)]
            it.join()
            weights = it.weights()

    A worker runs the script again, up to this call; then it executes scheduled functions, and the rest of the script
    does not run. Define functions before this call.

    Parameters
    ----------
    strategy : ParameterServerStrategy, optional
        With consistency `async` or `ssp:K`.
    variables : mapping of str to array
        Initial values; float32.
    optimizer : OptimizerSpec, optional
        Run by the shards; default: SGD with a rate of 0.01.
    tables : sequence of Table
        Embedding tables; functions request rows by `@ps.function(keys=...)`.
    seed : int
    name : str, optional
        Name of the job; default: the script's.
    settings : mapping of str to object, optional
        Further keys of a job file.
    queue : int
        Most incomplete functions; `schedule` waits while there are that many.
    timeout_s : float
        Default time-out of this object's calls.

    Attributes
    ----------
    run_dir : Path
        The run's folder: checkpoints, logs, weights.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy | None = None,
        *,
        variables: Mapping[str, Any],
        optimizer: OptimizerSpec | None = None,
        tables: Sequence[Table] = (),
        seed: int = 0,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        queue: int = QUEUE,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        checked_whole("queue", queue)
        checked_timeout_s(timeout_s)
        chosen = checked_servers(strategy)
        if chosen.consistency.startswith(("sync", "auto:")):
            raise ConfigurationError(
                f'ps.Coordinator with consistency = "{chosen.consistency}": functions are scheduled one by one, and '
                "a round or batch is many; allowed: async, ssp:K"
            )
        if chosen.consistency == "auto":  # auto would split batches, and a function cannot be split
            chosen = chosen.changed("async")
        if chosen.workers_as == THREADS:
            raise ConfigurationError(
                f"ps.Coordinator with workers_as={THREADS!r}: functions are found in the script that is run again; "
                f"allowed: {PROCESSES!r}"
            )
        self._queue, self._timeout_s, self._tls_dir = queue, timeout_s, chosen.tls_dir
        self._variables = checked_variables(variables)
        self._tables = checked_tables(tables)
        self._defined = names_now()
        self._scheduling = threading.Lock()
        self._noting = threading.Lock()
        self._noted = IntervalSet()  # complete steps that were checked for errors
        self._errors: dict[int, Failure] = {}  # not raised yet, by call; without a text beyond ERRORS_MAX
        self._values: weakref.WeakValueDictionary[int, RemoteValue] = weakref.WeakValueDictionary()
        self._next = 0
        self._joined = 0  # calls below it were all complete at one time; pushes that a shard loses later are repeated
        self._per_worker = 0
        self._swept_s = time.monotonic()
        self._keeping = threading.Lock()  # protects the files of calls and `_kept_bytes`
        self._kept_bytes = 0
        with SCRIPT.call(COORDINATOR) as answer:
            loaded = job_of(
                SCRIPT.path,
                chosen,
                checked_optimizer(optimizer),
                {"name": name or SCRIPT.job_name, "seed": seed, "epochs": 1, "batch_size": 1},
                settings,
                tables=plain_tables(self._tables),
                cluster={"device": "cpu", "speculate_after": 0},  # a function may have effects: no second run
            )
            if SCRIPT.is_worker:
                self._work(loaded, variables)
            self._control = RunControl(open_length=True, on_report=self._note)
            self._start(loaded)
            answer["run_dir"] = str(self.run_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        within(self._run, self.close, error)

    # --- scheduling ---

    def schedule(
        self,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> RemoteValue:
        """Schedule a function on any worker; return at once unless the queue is full.

        Parameters
        ----------
        function : Function
            Marked by `@ps.function`.
        args, kwargs
            Passed after the weights: arrays and JSON values.
        timeout_s : float, optional
            How long to wait for a place in the queue.

        Raises
        ------
        FunctionFailed
            If a function scheduled earlier raised an error; this one is then not scheduled.
        JobFailed
            If the job has failed.
        """
        if not isinstance(function, Function):
            named = getattr(function, "__qualname__", type(function).__name__)
            raise ConfigurationError(
                f"coordinator.schedule({named}, ...): due is a function of the top level that @ps.function marks"
            )
        call = FunctionCall(name_of(function, self._defined, "coordinator.schedule"), tuple(args), dict(kwargs or {}))
        with self._scheduling:
            if self._control.closed or self._control.stopping:
                raise ConfigurationError("coordinator.schedule after coordinator.close()")
            self._run.check()
            self._wait(lambda: self._outstanding() < self._queue, timeout_s, f"the queue of {self._queue} is full")
            if self._kept_bytes > KEPT_BYTES_MAX:
                raise ConfigurationError(
                    f"the arguments of calls that are in no checkpoint yet have {self._kept_bytes:,} bytes; allowed "
                    f"are {KEPT_BYTES_MAX:,}: lower checkpoint.every_s, or have each worker read large data itself"
                )
            self._raise_error()
            number = self._next
            with self._keeping:
                self._kept_bytes += self._calls.write(number, call)
            self._values[number] = value = RemoteValue(self, number)
            self._next += 1
            self._control.schedule(self._next)
        return value

    def create_per_worker_dataset(self, function: Callable[[], Any]) -> PerWorker:
        """Return an argument for `schedule` that stands for a separate dataset in each worker.

        In a scheduled function, iterating over it starts from the beginning; `next` continues after the worker's
        previous call. `iter(...)` of it is another argument: an iterator that starts at the beginning in each worker
        and continues across calls.

        Parameters
        ----------
        function : callable
            At the script's top level, without arguments; each worker calls it once and iterates over the result. If it
            returns an iterator, such as a generator, it is called again for each iteration. A restarted worker starts
            from the beginning.
        """
        name = name_of(function, self._defined, "coordinator.create_per_worker_dataset")
        self._per_worker += 1
        return PerWorker(self._per_worker - 1, name)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until all scheduled functions have run and every shard has applied their pushes.

        Raises
        ------
        FunctionFailed
            The first error that was not raised before; it marks all errors so far as raised. The other functions have
            run, and their pushes are applied.
        """
        self._wait(lambda: not self._outstanding(), timeout_s, "functions are not complete")
        self._joined = self._next
        self._raise_error()

    def done(self) -> bool:
        """Tell whether all scheduled functions have run and their pushes are applied; raises as `join` does.

        Once True, it stays True until the next `schedule`: if a shard is killed, lost pushes are repeated.
        """
        self._run.check()
        self._raise_error()
        if not self._outstanding():
            self._joined = self._next
        return self._joined == self._next

    def fetch(self, values: Any, timeout_s: float | None = None) -> Any:
        """Return a value, or a nested list, tuple or dict, with remote values replaced by their results."""
        allowed_s = self._allowed_s(timeout_s)

        def result(value: Any) -> Any:
            if isinstance(value, Mapping):  # a mapping that is not a dict
                return self.fetch(dict(value), allowed_s)
            return value.fetch(allowed_s) if isinstance(value, RemoteValue) else value

        return map_leaves(result, values)

    def weights(self) -> dict[str, Float32s]:
        """Return the current weights by name; the caller owns the arrays.

        After `join`, until the next `schedule`, they include all pushes: the call waits until a shard that was killed
        has them again.

        Raises
        ------
        TimeoutError
            If that takes longer than the coordinator's `timeout_s`.
        """
        return self._run.weights(self._joined if self._joined == self._next else 0, self._timeout_s)

    def table(self, name: str) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], Float32s]:
        """Return all rows of a table, as `Trainer.table` does; raise ConfigurationError while the job runs."""
        return self._run.table(name, self._tables)

    def close(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for scheduled functions, end the cluster, and return the run's report; its folder has the weights.

        Raises
        ------
        FunctionFailed
            As in `join`; the cluster has ended by then.
        TimeoutError
            If it takes longer than `timeout_s`. The cluster keeps running, and `close` may be called again; the end of
            the `with` block or of the program stops it.
        """
        allowed_s = self._allowed_s(timeout_s)
        self._control.close()
        if not self._next:
            self._run.stop()
            return {}
        report = self._run.finish(allowed_s)
        with suppress(OSError):
            self._calls.drop_calls(lambda number: True)
        atexit.register(self._calls.drop_results, lambda number: True)  # results can be fetched until then
        self._raise_error()
        return report

    def stop(self) -> None:
        """End the cluster at once; incomplete functions are lost."""
        self._run.stop()

    # --- inside ---

    def _work(self, loaded: LoadedJob, variables: Mapping[str, Any]) -> None:
        """Run this process's worker, then exit."""
        if SCRIPT.run_dir is None:
            raise ConfigurationError(
                "a worker of ps.Coordinator gets its arguments from the run folder: parashard worker --connect "
                "RUN-FOLDER, on a disk that it shares with the script"
            )
        source, code = ScheduledSource(), SCRIPT.sources.code()
        check_same_call(loaded, source.spec, code, SCRIPT.run_dir)
        functions = ScheduledFunctions(variables, Calls(SCRIPT.run_dir), SCRIPT.worker_name, self._tables)
        known = code_of(SCRIPT.run_dir)
        SCRIPT.work(functions, source, known.identity if known is not None else code.sha256)

    def _start(self, loaded: LoadedJob) -> None:
        command, code, credentials = SCRIPT.command, SCRIPT.sources.code(), job_credentials(self._tls_dir)
        declared = declare(ScheduledSource.spec, self._variables, code.sha256)
        self.run_dir = new_run_dir(None, loaded.job.job.name).absolute()
        self._calls = Calls(self.run_dir)
        self._calls.make()
        SCRIPT.write_results(self.run_dir)
        write_code(self.run_dir, RunCode(code.sha256, code, code), SCRIPT.sources.texts)
        self._kept_checkpoints = loaded.job.checkpoint.keep
        run = Run(loaded, self.run_dir, declared, credentials, script=command)
        self._run = BackgroundRun(run, self._control, SCRIPT.program(COORDINATOR))
        self._store_url = run.store_url
        self._run.start()

    def _outstanding(self) -> int:
        return self._next - len(self._control.complete)

    def _allowed_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else checked_timeout_s(timeout_s)

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        allowed_s = self._allowed_s(timeout_s)
        if self._control.wait_for(condition, allowed_s):
            return
        self._run.check()
        raise TimeoutError(f"after {allowed_s:g} s {what}; `parashard status` says what the job waits for")

    def _raise_error(self) -> None:
        """Raise the first error not raised before; mark all as raised."""
        with self._noting:
            errors, self._errors = self._errors, {}
        if errors:
            number, failure = next(iter(errors.items()))
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            says = failure.says or f"call {number} has failed, and its fetch() says why"
            raise _failed(Failure(f"{says}{more}", failure.kind))

    def _fetched(self, number: int, timeout_s: float | None) -> Any:
        self._wait(lambda: number in self._control.complete, timeout_s, f"call {number} is not complete")
        failure = self._calls.error(number)
        if failure is not None:
            with self._noting:
                self._errors.pop(number, None)
            raise _failed(failure)
        result = self._calls.result(number)
        self._calls.drop_result(number)
        return result

    def _note(self, complete: IntervalSet) -> None:
        """Collect the errors of newly completed steps; runs in the run's thread."""
        for start, stop in complete.intervals():
            for new_start, new_stop in list(self._noted.missing(start, stop)):
                for number in range(new_start, new_stop):
                    failure = self._calls.error(number)
                    if failure is not None:
                        with self._noting:
                            self._errors[number] = failure if len(self._errors) < ERRORS_MAX else Failure("")
                self._noted.add_range(new_start, new_stop)
        if time.monotonic() - self._swept_s > SWEEP_S:
            self._swept_s = time.monotonic()
            with suppress(OSError, ParashardError):  # P21: the next sweep retries
                self._sweep()

    def _sweep(self) -> None:
        """Remove results that can no longer be fetched, and arguments that no restarted shard can need."""
        self._calls.drop_results(self._is_unwanted)
        catalogue = Catalogue(open_store(self._store_url))
        for after_damage in (True, False):
            saved = restorable_in_all(catalogue, self._kept_checkpoints, after_damage=after_damage)
            with self._keeping:  # else calls written meanwhile would not be counted
                self._kept_bytes = self._calls.drop_calls(saved.__contains__)
            if self._kept_bytes <= KEPT_BYTES_MAX // 2:
                break  # else drop calls that only one chain of checkpoints has, to free space

    def _is_unwanted(self, number: int) -> bool:
        value = self._values.get(number)
        return number in self._noted and (value is None or value.fetched)


def _failed(failure: Failure) -> FunctionFailed:
    error = FunctionFailed(failure.says)
    error.type_name = failure.kind
    known = getattr(builtins, failure.kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with suppress(Exception):  # a class that needs other arguments
            error.__cause__ = known(failure.says)
    return error
