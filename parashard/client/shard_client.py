"""ShardClient: pulls variables from all shards and pushes gradients to all shards.

Splits variables by the plan, encodes gradients and sends them by a transport; `parashard.client.fan_out` waits and
retries. Knows no lease and no model. A push is sent whole or reported as failed, with the shard named. A push is
idempotent, because the step identifies it: resending is always safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parashard.client.fan_out import FanOut
from parashard.client.pulled import Memory, PullBuffers, Pulled, aligned
from parashard.client.pulled_rows import NO_TABLES, PulledRows, RowPart, TableSet, rows_by_shard, with_rows
from parashard.encodings.feedback import Encoded, EncodedParts, GradientEncoder, OutcomeCallback
from parashard.errors import RetryLater, ShapeMismatch, UnknownVariable
from parashard.plan.embedding import Keys
from parashard.plan.partition import ELEMENT_BYTES, Plan
from parashard.plan.variables import Float32s, global_norm
from parashard.process import failpoints
from parashard.process.logs import log
from parashard.protocol import rpc
from parashard.protocol.messages import (
    NO_KEYS,
    Ack,
    Buffers,
    Fetched,
    PullRun,
    Push,
    PushResult,
    Slice,
    Target,
)
from parashard.telemetry.trace_context import traceparent
from parashard.telemetry.tracing import NO_SPAN
from parashard.transports.base import Connect, Greeting, Pending, ShardAddress, Transport, View
from parashard.transports.grpc import GrpcTransport

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

UNACKNOWLEDGED_MAX = 4096


class Pushed(NamedTuple):
    """Result of a push: each shard's ack, and the incarnation that sent it."""

    acks: tuple[Ack, ...]
    incarnations: tuple[int, ...]


class ShardConnection(NamedTuple):
    """A shard in a view, and the transport to it."""

    target: Target
    transport: Transport


class ShardClient:
    """A connection to all shards of a job."""

    def __init__(
        self,
        run_id: str,  # every request names it, and the digest
        job_digest: str,
        plan: Plan,  # variables and their partitions
        worker: str,  # its name, for the shards' logs
        *,
        retry_budget_s: float = 30.0,  # for a request to one shard that is busy, unreachable or restarting
        cancelled: threading.Event | None = None,  # once set, nothing is retried any more
        now_s: Callable[[], float] | None = None,  # clock of the budget; None: monotonic seconds
        look: Callable[[], View] | None = None,  # the current view, or RetryLater; None: views come only from `use`
        connect: Connect = GrpcTransport,
        tracer: Tracer | None = None,
        tables: TableSet = NO_TABLES,
        sends_norms: bool = False,  # each push carries the norm of its whole gradient, for shards that clip batches
        memory: Memory = aligned,  # allocates the arrays to pull into
    ) -> None:
        self._run_id = run_id
        self._job_digest = job_digest
        self._plan = plan
        self._tables = tables
        self._sends_norms = sends_norms
        self._worker = worker
        self._viewing = threading.Lock()
        self._look = look
        self._fan_out = FanOut(retry_budget_s, cancelled or threading.Event(), self.refresh if look else None, now_s)
        self._connect = connect
        self._tracer = tracer
        self._transports: dict[ShardAddress, Transport] = {}
        self._shards: tuple[ShardConnection, ...] = ()  # of `view`
        self._closed = False
        self._encoder = GradientEncoder(plan)
        self._slices = [
            [
                (placed, Slice(placed.partition, plan.variables[placed.partition.variable].row_elements))
                for placed in layout
            ]
            for layout in plan.layouts
        ]  # of a gradient that is not encoded
        self._shard_bytes = [plan.shard_elements(shard) * ELEMENT_BYTES for shard in range(len(plan.shards))]
        self._no_rows = PulledRows(tables)
        self._unacknowledged: set[tuple[int, int]] = set()  # (step, shard) of encoded pushes whose ack never came
        self._sets = PullBuffers(plan, memory)
        self.view = View(0, ())

    def use(self, view: View) -> None:
        """Send to these shards from now on, unless a newer view is in use; connections to others are closed."""
        with self._viewing:
            if self._closed or view.number < self.view.number:
                return
            for where in set(self._transports) - set(view.shards):
                self._transports.pop(where).close()
            shards = []
            for shard, where in enumerate(view.shards):
                target = Target(self._run_id, self._job_digest, self._plan.version, shard, where.incarnation)
                if where not in self._transports:
                    self._transports[where] = self._connect(where, Greeting(target, self._worker))
                shards.append(ShardConnection(target, self._transports[where]))
            self._shards, self.view = tuple(shards), view

    def refresh(self) -> None:
        """Use the shards' present view if the coordinator gives it; otherwise keep the old one until the next retry."""
        if self._look is None:
            return
        try:
            self.use(self._look())
        except RetryLater as error:
            log.info("no-view", error=str(error))

    def close(self) -> None:
        """Close every connection, and let no view open others."""
        with self._viewing:
            self._closed = True
            transports = list(self._transports.values())
            self._transports.clear()
        for transport in transports:
            transport.close()

    def pull(
        self,
        *,
        step: int | None = None,
        round_: int | None = None,
        keys: Mapping[str, Keys] = NO_KEYS,
        least_version: int = 0,
    ) -> Pulled:
        """Pull every variable from all shards in parallel; unchanged partitions are not sent again.

        Parameters
        ----------
        step : int, optional
            The step that the weights are for; the shards' traces name it.
        round_ : int, optional
            In `sync:N`: the round whose starting weights to pull.
        keys : mapping of str to ndarray of uint64
            By table: rows to pull as well; mixed keys, ascending, unique.
        least_version : int
            Minimum version of each shard's weights; a shard waits for it briefly.

        Raises
        ------
        StaleRequest
            If the view is old (`StaleIncarnation`, `StalePlan`), the round is over (`StaleRound`), or a shard did not
            reach the version in time (`TooEarly`).
        RetryLater
            If a shard gave no answer within the retry budget.
        UnknownVariable
            If there is no such table.
        """
        begun, rows = self._shards, PulledRows(self._tables, keys) if keys else self._no_rows
        batches = rows.request_batches(len(begun)) if keys else [[RowPart(shard, {}) for shard in range(len(begun))]]
        # The first part of each shard comes with its variables.
        answered = [[begun[part.shard].target.incarnation for part in parts] for parts in batches]
        weights = self._sets.take(tuple([shard.target.incarnation for shard in begun]))

        def pull(batch: int, number: int) -> Pending[Fetched]:
            """Start a pull of a shard's variables and the first part of its rows, or of a later part."""
            part = batches[batch][number]
            shard = part.shard
            target, transport = self._shards[shard]
            answered[batch][number] = target.incarnation
            known = weights.versions[shard] if target.incarnation == begun[shard].target.incarnation else None
            length = 0 if batch else self._shard_bytes[shard]
            wanted, rows_bytes = (rows.keys_of(part), rows.answer_bytes_of(part)) if part.keys else (NO_KEYS, 0)
            run = PullRun(target, round_, step, 0, length, known, context, wanted, least_version)
            into = Buffers([]) if batch else weights.by_shard[shard]
            return transport.pull(run, into, rpc.data_deadline_s(length + rows_bytes), partial(rows.fill, part))

        with NO_SPAN if self._tracer is None else self._tracer.phase("pull", self._worker, step) as span:
            context = "" if span is None else traceparent(span)
            try:
                found = [
                    self._fan_out.request_all(partial(pull, batch), len(parts)) for batch, parts in enumerate(batches)
                ]
                versions = [[fetched.version for fetched in batch] for batch in found]
                weights.versions = tuple(versions[0])
                weights.incarnations = tuple(answered[0])
            except BaseException:
                weights.versions = (None,) * len(begun)  # the content of its arrays is undefined
                self._sets.give_back(weights)
                raise
        waited_s = sum(max((fetched.waited_s for fetched in batch), default=0.0) for batch in found)
        pulled = Pulled(weights, self._sets, rows, waited_s)
        for batch in range(1, len(batches)):
            pulled.include(batches[batch], versions[batch], answered[batch])
        return pulled

    def push(
        self,
        step: int,
        gradients: Mapping[str, Float32s],
        pulled: Pulled | None,
        *,
        skipped: bool = False,
        learning_rate: float | None = None,
        void: bool = False,
        keys: Mapping[str, Keys] = NO_KEYS,
        norm: float | None = None,
    ) -> Pushed:
        """Push a step's gradients to all shards in parallel; return every shard's ack.

        Parameters
        ----------
        step : int
            The push's identity.
        gradients : mapping of str to ndarray of float32
            By variable, in the declared shapes, finite; a variable left out has a zero gradient. By table: of the
            pulled rows, in their order. Only read; they must not change before the push returns. A variable encoded as
            bfloat16 or float16 may also be given as its uint16 codes, an int8 one as `EncodedParts`, as a GPU makes
            them.
        pulled : Pulled, optional
            The weights that the gradients were computed at; None: unknown.
        skipped : bool
            True: the empty push of a skipped step.
        learning_rate : float, optional
            The step's rate from its lease; None: the job's.
        void : bool
            True: the step changes no weights and has no gradients. Refused in `sync:N`.
        keys : mapping of str to ndarray of uint64
            Row keys of the tables' gradients if `pulled` is None; mixed, ascending, unique.
        norm : float, optional
            Norm of all gradients together; None: with `sends_norms` it is computed here, from float32 gradients.

        Raises
        ------
        InvalidRequest
            If a shard refuses the gradient; the same push never succeeds.
        StaleRequest
            If the view is old, or the round is over: the step is already applied, or will be leased again.
        RetryLater
            If a shard gave no ack within the retry budget. Other shards may have the step; that is safe.
        """
        begun = self._shards
        unsettled: list[list[Encoded | OutcomeCallback]] = [[] for _ in begun]

        def push(shard: int) -> Pending[Ack]:
            if shard:
                failpoints.hit("worker.push.between_shards")
            target, transport = self._shards[shard]
            mine = prepared[shard]
            if target.incarnation != mine.target.incarnation:  # known versions are of the old one
                mine = prepared[shard] = mine._replace(target=target, pulled_version=None)
            return transport.push(mine, rpc.data_deadline_s(mine.payload.nbytes))

        def settle(shard: int, ack: Ack) -> None:
            # In sync:N there are no residues, and held gradients will be applied. If our ack was lost, DUPLICATE
            # means that our own push was taken: restoring its residue would send it twice.
            lost = (step, shard) in self._unacknowledged
            self._unacknowledged.discard((step, shard))
            ours = ack.result is not PushResult.DUPLICATE or lost
            self._encoder.settle(unsettled[shard], applied=ours)

        def unacknowledged(shard: int) -> None:
            if unsettled[shard] and len(self._unacknowledged) < UNACKNOWLEDGED_MAX:
                self._unacknowledged.add((step, shard))

        with NO_SPAN if self._tracer is None else self._tracer.phase("push", self._worker, step) as span:
            context = "" if span is None else traceparent(span)
            keys = keys if pulled is None else pulled.keys
            of_rows = self._checked_rows(keys, gradients) if keys else {}
            arrays = self._checked({n: g for n, g in gradients.items() if n not in keys} if keys else gradients)
            if norm is None and self._sends_norms and arrays:
                norm = self._norm({**arrays, **of_rows})
            try:
                prepared = []
                for shard, (target, _) in enumerate(begun):
                    slices, payload = self._encoded(shard, arrays, unsettled[shard])
                    known = pulled is not None and pulled.incarnations[shard] == target.incarnation
                    version = pulled.versions[shard] if pulled is not None and known else None
                    prepared.append(
                        Push(
                            target=target,
                            worker=self._worker,
                            step=step,
                            slices=slices,
                            skipped=skipped,
                            pulled_version=version,
                            payload=payload,
                            traceparent=context,
                            learning_rate=learning_rate,
                            void=void,
                            norm=norm,
                        )
                    )
                if of_rows:
                    prepared = list(map(with_rows, prepared, rows_by_shard(self._tables, keys, of_rows, len(prepared))))
                if any(unsettled) or self._unacknowledged:
                    acks = self._fan_out.request_all(push, len(prepared), settle, unacknowledged)
                else:
                    acks = self._fan_out.request_all(push, len(prepared))
            finally:
                for encoded in filter(None, unsettled):
                    self._encoder.settle(encoded, applied=False)
            if span is not None:
                span.set_attribute("parashard.results", [ack.result.name.lower() for ack in acks])
                staleness = [ack.staleness for ack in acks if ack.staleness is not None]
                if staleness:
                    span.set_attribute("parashard.staleness", max(staleness))
        return Pushed(acks, tuple(push.target.incarnation for push in prepared))

    def _checked(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Return gradients, or their codes, as contiguous arrays; refuse unknown variables and wrong shapes."""
        arrays: dict[str, Any] = {}
        for name, gradient in gradients.items():
            variable = self._plan.variables.get(name)
            if variable is None:
                raise UnknownVariable(f"a gradient for {name!r}, which is none of the job's variables")
            if np.shape(gradient) != variable.shape:
                raise ShapeMismatch(
                    f"the gradient of {name!r} has shape {np.shape(gradient)}, the variable has {variable.shape}"
                )
            if isinstance(gradient, EncodedParts):
                arrays[name] = gradient
            elif not variable.frozen:
                is_codes = getattr(gradient, "dtype", None) == np.uint16 and self._encoder.takes_codes(name)
                arrays[name] = np.ascontiguousarray(gradient, np.uint16 if is_codes else np.float32)
        return arrays

    def _checked_rows(self, keys: Mapping[str, Keys], gradients: Mapping[str, Float32s]) -> dict[str, Float32s]:
        """Return gradients of rows as contiguous float32, by table."""
        arrays = {}
        for name in keys.keys() & gradients.keys():
            due = (len(keys[name]), self._tables.by_name[name].row_elements)
            if np.shape(gradients[name]) != due:
                raise ShapeMismatch(
                    f"the gradient of table {name!r} has shape {np.shape(gradients[name])}, the rows have {due}"
                )
            arrays[name] = np.ascontiguousarray(gradients[name], np.float32)
        return arrays

    def _norm(self, gradients: Mapping[str, Float32s]) -> float:
        """Return the norm of all gradients together, excluding state without gradients, which is not clipped."""
        variables = self._plan.variables
        return global_norm({n: g for n, g in gradients.items() if n not in variables or not variables[n].state})

    def _encoded(
        self, shard: int, arrays: Mapping[str, Any], encoded: list[Encoded | OutcomeCallback]
    ) -> tuple[tuple[Slice, ...], Buffers]:
        """Return a shard's slices and payload; append encoded gradients to `encoded`, for settling after the push."""
        slices, pieces = [], []
        for placed, plain in self._slices[shard]:
            p = placed.partition
            if p.variable not in arrays:
                continue
            gradient = arrays[p.variable]
            if isinstance(gradient, EncodedParts):
                encoded.append(OutcomeCallback(gradient.settle, shard))
                slices.append(self._encoder.slice_of(placed))
                pieces.append(gradient.payloads[p])
                continue
            rows = gradient[p.row_start : p.row_stop]
            if self._plan.variables[p.variable].encoding == "float32":
                slices.append(plain)
                pieces.append(rows.data)
            elif rows.dtype == np.uint16:
                slices.append(self._encoder.slice_of(placed))
                pieces.append(rows.data)
            else:
                mine = self._encoder.encode(shard, placed, rows.reshape(-1))
                encoded.append(mine)
                slices.append(mine.slice)
                pieces.append(mine.payload)
        return tuple(slices), Buffers(pieces)
