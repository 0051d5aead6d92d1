"""ProgramSession: a worker whose steps a program's own loop computes.

::

    with parashard.connect("runs/digits-1") as session:
        for step in session.steps():
            loss, gradients = mine(session.pull(), step.batch)
            session.push(step, gradients, loss=loss)

Owns the program's interface: steps, weights, and the checks of pushes; it uses the session of every worker
(`parashard_worker.session`), with a pipeline of depth 0. A session is used in one thread; a process may have several
sessions, each in its own thread.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import numpy as np

from parashard._proto import coordinator_pb2 as pb
from parashard.client.proto_conversion import plan_from
from parashard.client.pulled import read_only
from parashard.data.base import Batch, Indices
from parashard.errors import (
    ConfigurationError,
    InvalidRequest,
    JobFailed,
    ParashardError,
    ShapeMismatch,
    UnknownVariable,
)
from parashard.job.embeddings import tables_of
from parashard.job.layers import Override
from parashard.launch.run_folders import check_in_progress, how_it_ended
from parashard.models.framework import step_seed
from parashard.models.looking_up import NO_NAMED_ROWS, NamedRows, named_rows
from parashard.plan.embedding import EmbeddingTable, Keys
from parashard.plan.partition import Plan
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Float32s
from parashard.process.logs import log
from parashard.process.shell import Stop
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.security.given_credentials import credentials_in
from parashard_worker.computing import NOT_FLOATING_POINT, Task, clip_and_weight
from parashard_worker.device import Cpu
from parashard_worker.loading import ANY_WORKER, job_of, load_task
from parashard_worker.loop import check_store, evaluate, keep_evaluated
from parashard_worker.round_weights import round_weights
from parashard_worker.session import LeasedStep, Reading, Session
from parashard_worker.worker import Membership, tell_hung

LOOK_S = 0.5
EXAMPLES_MAX = 2**32 - 1
SCRIPT = "script"
"""Data source and model kind that exist only in the program that defined the job."""


def _whole(examples: object) -> int:
    try:
        count = -1 if isinstance(examples, bool) else operator.index(examples)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if not 0 <= count <= EXAMPLES_MAX:
        raise ConfigurationError(f"session.push: examples={examples!r}; allowed: a whole number up to {EXAMPLES_MAX:,}")
    return count


@dataclass(frozen=True)
class Step:
    """A leased step.

    Parameters
    ----------
    number : int
        Its identity: it is applied once, however often it is computed.
    epoch : int
    indices : ndarray of int64
        Its examples, by their positions in the training split.
    seed : int
        For random numbers in the step: the same at every attempt.
    batch : Batch, optional
        Its examples; None if the job's data are not open here.
    """

    number: int
    epoch: int
    indices: Indices
    seed: int
    batch: Batch | None


class _Read(NamedTuple):
    """A step with its examples, and the rows of tables that it needs."""

    step: Step
    rows: NamedRows

    @property
    def keys(self) -> Mapping[str, Keys]:
        """The keys of these rows."""
        return self.rows.keys


class ProgramSession:
    """A program as a worker of a running job.

    Parameters
    ----------
    run : str
        A run directory, or host:port of the coordinator.
    name : str
        The worker's name in the job; "": the next free one.
    data : bool
        False: open neither the job's data nor its model, and take no evaluations.
    overrides : sequence of (dotted key, value, name of the flag)
        Settings that differ on this machine, such as data.path.
    tls_dir : Path, optional
        Folder of the TLS credentials.
    keys : callable (Step) -> mapping of str to array of whole numbers, optional
        For a job with embedding tables: returns the ids whose rows a step needs, by table; default: as the job's model.
    """

    def __init__(
        self,
        run: str,
        *,
        name: str = "",
        data: bool = True,
        overrides: Sequence[Override] = (),
        tls_dir: Path | None = None,
        keys: Callable[[Step], Mapping[str, Any]] | None = None,
    ) -> None:
        self._run = run
        self._name = name
        self._data = data
        self._overrides = overrides
        self._tls_dir = tls_dir
        self._keys = keys
        self._tables: Mapping[str, EmbeddingTable] = {}
        self._entered = ExitStack()
        self._task: Task | None = None
        self._session: Session
        self._plan: Plan
        self._steps: StepPlan
        self._leased: LeasedStep | None = None  # the present step
        self._named = NO_NAMED_ROWS  # rows of tables of the present step
        self._refused: InvalidRequest | None = None  # why the newest push of the present step was refused
        self._computing = ExitStack()
        self._stop = Stop()
        self._over: tuple[str, str] | None = None  # how the run ended, if read from its folder: (state, reason)

    @property
    def name(self) -> str:
        """The worker's name in the job."""
        return self._name

    def __enter__(self) -> Self:
        check_in_progress(self._run)
        with ExitStack() as entered:
            stop = self._stop
            credentials = credentials_in(self._tls_dir)
            coordinator = CoordinatorClient(
                find_coordinator(self._run),
                cancelled=stop.event,
                where=self._run,
                credentials=credentials,
                tell=_tell_waiting,
            )
            entered.callback(coordinator.close)
            self._coordinator, self._stop = coordinator, stop
            threading.Thread(target=self._watch, name="session", daemon=True).start()
            reply = coordinator.get_job()
            job = job_of(reply, self._overrides)
            self._tables = {table.name: table for table in tables_of(job)}
            coordinator.retry_budget_s = job.cluster.retry_budget_s
            device, self._plan = Cpu(), plan_from(reply.plan)
            if self._data and SCRIPT not in (job.data.source, job.model.kind):
                check_store(reply)
                self._task = load_task(reply, job, start=replace(ANY_WORKER, device="cpu"), threads=None)
            self._check_keys()
            self._job_seed = job.job.seed
            self._clips = job.step_clip_norm, job.optimizer.variable_clip_norm
            self._steps = job.steps(reply.examples)
            if reply.batched and self._steps.parts > 1:
                raise ConfigurationError(
                    f"the data of this run are whole batches, which its workers share (consistency.policy "
                    f"{job.consistency.policy}), and a session has no part of one: begin the run with "
                    'consistency="auto:1" or "async"'
                )
            self._weights = round_weights(job, self._steps)
            membership = Membership(coordinator, reply, job, self._plan, credentials=credentials)
            # P13: the program's arithmetic is its own, and in sync:N every worker's must be the same.
            own = f"{device.fingerprint()}; a program's own loop"
            member = membership.join(self._name, own, device.name)
            self._name = member.name
            evaluates = self._task is not None
            leasing, client = membership.connected(member, stop, tell_hung, evaluates=evaluates)
            policy = job.consistency.policy
            keep = partial(keep_evaluated, reply.checkpoint_url, reply.run_id, self._plan.variables)
            self._session = Session(
                client,
                leasing,
                Reading(self._read, bool(self._tables)),
                round_steps=policy.bound if policy.kind == "sync" else None,
                evaluate=lambda grant: evaluate(grant, cast(Task, self._task), client, leasing, keep),
            )
            entered.callback(stop.ask, "the session is over")
            entered.enter_context(membership.working(leasing, client))
            log.info("joined", worker=member.name, run=self._run)
            self._entered = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._leased is not None and isinstance(error, Exception):
            self._failed(error)
        self._stopping()
        self._session.give_back()
        over, leasing = self._over, self._session.leasing
        try:
            self._entered.__exit__(kind, error, where)
        except ParashardError:
            if error is not None or over is None:
                raise
        if error is None and ((over is not None and over[0] != "done") or leasing.work.state == pb.JOB_STATE_FAILED):
            state, reason = over or ("failed", leasing.work.reason)
            raise JobFailed(f"the job is {state}: {reason}")

    def steps(self) -> Iterator[Step]:
        """Lease steps, one after the other, until the job is over.

        A step that is not pushed when the next one is requested, or when the session ends, is given back, and leased
        again, to this worker or another; if an exception ends the session, it counts as a failed attempt. The weights
        are pulled before a step is yielded; a step whose round has ended by then is not yielded.
        """
        for leased in self._session.steps(self._stopping):
            self._leased = leased
            self._computing.enter_context(self._session.computing(leased))
            try:
                step, self._named = self._session.read(leased)
            except _DataFailed as failed:
                self._failed(failed.error)
                continue
            if len(step.indices):
                yield step
            else:
                self._push({}, None, 0)  # a part of a batch without examples

    def pull(self) -> Mapping[str, Float32s]:
        """Return the weights of the present step, by name.

        They were pulled after the step was leased, and belong to the session: they are read-only, and change once the
        step is pushed or given back. Copy arrays that you keep. Each table whose ids were named is included under its
        name as an array of rows, of shape (*ids.shape, dimension), which belongs to the program.
        """
        leased = self._leased
        if leased is None or leased.pulled is None:
            raise ConfigurationError("session.pull() is of a step: call it in `for step in session.steps()`, once each")
        return {**read_only(leased.pulled.variables), **self._named.by_id(leased.pulled.rows)}

    def push(
        self,
        step: Step,
        gradients: Mapping[str, Any] | None,
        *,
        loss: float | None = None,
        examples: int | None = None,
    ) -> bool:
        """Push the present step to all shards, which apply a step once even if it is computed again.

        Parameters
        ----------
        step : Step
        gradients : mapping of str to array of floating point, or None
            In the variables' shapes, for a table in that of its rows by id; a missing gradient is zero. None: the step
            changes nothing, not even by momentum or decay (`async` and `ssp`).
        loss : float, optional
            For the status and the report.
        examples : int, optional
            Number of examples in the step; default: the number of its indices.

        Returns
        -------
        bool
            Whether every shard has it. If not, the step was given back: it is applied already, or is leased again.

        Raises
        ------
        ConfigurationError
            If `step` is not the present step, or `examples` is no whole number.
        InvalidRequest
            If the gradients are not of the job's variables, or not finite. Nothing was sent, and the step is still the
            present one; if it is not pushed after all, the attempt counts as failed.
        """
        if not isinstance(step, Step):
            raise ConfigurationError(f"session.push takes a step of session.steps(), found {step!r}")
        if self._leased is None or self._leased.number != step.number:
            raise ConfigurationError(
                f"step {step.number} is not the session's present one: a step is pushed once, before the next one"
            )
        count = len(step.indices) if examples is None else _whole(examples)
        try:
            arrays = None if gradients is None else self._checked(step.number, loss, gradients)
        except InvalidRequest as error:
            self._refused = error
            raise
        why_not = self._push(arrays, loss, count)
        if isinstance(why_not, InvalidRequest):
            raise why_not
        return why_not is None

    # --- inside ---

    def _stopping(self) -> bool:
        """End the present step before the next one: a push that was refused is a failed attempt."""
        if self._refused is not None:
            self._failed(self._refused)
        self._end_step()
        return self._stop.asked

    def _push(
        self, gradients: Mapping[str, Float32s] | None, loss: float | None, examples: int
    ) -> ParashardError | None:
        leased = self._leased
        assert leased is not None
        self._end_step()
        return self._session.push(leased, gradients, loss=None if loss is None else float(loss), examples=examples)

    def _failed(self, error: BaseException) -> None:
        """Report the present step as failed."""
        assert self._leased is not None
        self._computing.close()
        self._session.failed(self._leased, error)
        self._end_step()

    def _end_step(self) -> None:
        self._computing.close()
        self._leased = self._refused = None

    def _read(self, number: int) -> _Read:
        """Return a step, with the names of its rows."""
        try:
            batch = self._task.batch_of(number) if self._task is not None else None
        except ParashardError as error:
            raise _DataFailed(error) from error
        seed = step_seed("session", self._job_seed, self._steps.steps_before + number)
        step = Step(number, self._steps.epoch_of(number), self._steps.indices(number), seed, batch)
        return _Read(step, self._named_by(step) if self._tables and len(step.indices) else NO_NAMED_ROWS)

    def _named_by(self, step: Step) -> NamedRows:
        if self._keys is not None:
            return named_rows(self._keys(step), self._tables)
        assert step.batch is not None, "checked as the session began"
        return NamedRows(dict(step.batch.keys), dict(step.batch.places))

    def _check_keys(self) -> None:
        """Refuse a job with tables if nothing names the rows that a step needs, and `keys` without tables."""
        tables = ", ".join(sorted(self._tables))
        if self._tables and self._keys is None and self._task is None:
            raise ConfigurationError(
                f"the job has the tables {tables}, and nothing says which rows a step needs: "
                "ps.connect(..., keys=lambda step: {...}) names their ids, by table"
            )
        if self._keys is not None and not self._tables:
            raise ConfigurationError("keys= names rows of tables, and the job has none")

    def _checked(self, step: int, loss: float | None, gradients: Mapping[str, Any]) -> dict[str, Float32s]:
        variables = self._plan.variables
        arrays: dict[str, Float32s] = {}
        for name, gradient in gradients.items():
            if name in self._tables:
                summed = self._named.gradient(name, gradient, self._tables)
                if len(summed):
                    arrays[name] = summed
                continue
            if name not in variables:
                raise UnknownVariable(f"a gradient for {name!r}, which is none of {', '.join(sorted(variables))}")
            array = np.asarray(gradient)
            if array.dtype.kind in NOT_FLOATING_POINT or array.shape != variables[name].shape:
                raise ShapeMismatch(
                    f"the gradient of {name!r} is {array.dtype} {array.shape}; due is floating point "
                    f"{variables[name].shape}"
                )
            if not variables[name].frozen:
                arrays[name] = np.asarray(array, np.float32)
        weight = self._steps.share(step) if self._weights is None else self._weights.factor(step)
        told = 0.0 if loss is None else float(loss)
        return clip_and_weight(step, told, arrays, self._clips, self._plan.variables, weight)

    def _watch(self) -> None:
        """Stop waiting for shards and the coordinator once the run folder says that the run has ended."""
        while not self._stop.wait(LOOK_S):
            ended = how_it_ended(Path(self._run)) if self._coordinator.unanswered else None
            if ended is not None:
                self._over = ended
                self._stop.ask(ended[1])


class _DataFailed(Exception):
    """A step's examples cannot be read, which is not the program's error."""

    def __init__(self, error: ParashardError) -> None:
        super().__init__(str(error))
        self.error = error


def _tell_waiting(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr may be closed
        sys.stderr.write(f"ps.connect: {text}\n")
        sys.stderr.flush()
