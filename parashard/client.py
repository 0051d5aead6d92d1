"""ShardClient: pulls variables from all shards and pushes gradients to all shards.

Cuts by the plan, frames by `parashard.wire`, sends by a transport. Knows no lease and no model. Called by the worker's
loop, by the coordinator (final weights) and by tools. A push is sent whole or reported as failed, with the shard named;
to send it again is always safe, because the step is its identity (P1).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import tenacity

from parashard import failpoints, rpc, wire
from parashard.errors import (
    MalformedFrame,
    RetryLater,
    ShapeMismatch,
    StaleIncarnation,
    UnknownAttempt,
    UnknownVariable,
    Unreachable,
)
from parashard.messages import CHUNK_BYTES_MAX, PullRun, PushChunk, PushResult, Receipt, Slice, Target
from parashard.partition import ELEMENT_BYTES, Placed, Plan
from parashard.push import ShardPush, new_attempt
from parashard.transports.base import Reply, Transport
from parashard.transports.grpc import GrpcTransport
from parashard.variables import Float32s

RETRY_PAUSE_S = 0.02
RETRY_PAUSE_MAX_S = 1.0
WHOLE_ATTEMPTS_MAX = 5
IN_FLIGHT_MAX = 16  # messages of one operation that wait for an answer, each of at most 4 MiB

_Request = TypeVar("_Request")


@dataclass(frozen=True)
class View:
    """Where every shard is now, and which life it leads; `number` rises with every change."""

    number: int
    addresses: tuple[str, ...]
    incarnations: tuple[int, ...]


@dataclass(frozen=True)
class Pulled:
    """Variables as pulled.

    Attributes
    ----------
    variables : dict of str to ndarray of float32
        By name, in their declared shapes; owned by the caller. In `async` and `ssp` runs of a large shard may be of
        neighbouring versions.
    versions : tuple of int
        By shard: the lowest version among what was pulled from it.
    incarnations : tuple of int
        By shard: the life that answered.
    """

    variables: dict[str, Float32s]
    versions: tuple[int, ...]
    incarnations: tuple[int, ...]


@dataclass(frozen=True)
class Pushed:
    """What became of a push: by shard its receipt, and the life that gave it."""

    receipts: tuple[Receipt, ...]
    incarnations: tuple[int, ...]


class _StopWhenAway(tenacity.stop.stop_base):
    """Retry no more once nobody has answered for so long."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        nobody = retry_state.outcome is not None and isinstance(retry_state.outcome.exception(), Unreachable)
        return nobody and (retry_state.seconds_since_start or 0.0) >= self._budget_s


class ShardClient:
    """A connection to all shards of a job.

    Parameters
    ----------
    run_id, job_digest : str
        What every request names (P2).
    plan : Plan
        How variables are cut.
    worker : str
        Who asks; for the shards' logs.
    retry_budget_s : float
        How long one message may be sent again while a shard asks for patience.
    away_budget_s : float
        How long it may be sent again while nobody answers: the shard may live elsewhere by now, as a newer view says.
    giving_up : Event, optional
        Once set, nothing is retried any more.
    connect : callable
        From an address to a Transport; a test's fake comes in here.
    """

    def __init__(
        self,
        run_id: str,
        job_digest: str,
        plan: Plan,
        worker: str,
        *,
        retry_budget_s: float = 30.0,
        away_budget_s: float = 30.0,
        giving_up: threading.Event | None = None,
        connect: Callable[[str], Transport] = GrpcTransport,
    ) -> None:
        self._run_id = run_id
        self._job_digest = job_digest
        self._plan = plan
        self._worker = worker
        self._retry_budget_s = retry_budget_s
        self._away_budget_s = away_budget_s
        self._viewing = threading.Lock()
        self._giving_up = giving_up or threading.Event()
        self._connect = connect
        self._transports: dict[str, Transport] = {}
        self._slices = [self._trainable_slices(layout) for layout in plan.layouts]
        self.view = View(0, (), ())

    def use(self, view: View) -> None:
        """Send to these shards from now on, unless a newer view is in use; connections to others are closed."""
        with self._viewing:
            if view.number < self.view.number:
                return
            for address in set(self._transports) - set(view.addresses):
                self._transports.pop(address).close()
            for address in view.addresses:
                if address not in self._transports:
                    self._transports[address] = self._connect(address)
            self.view = view

    def close(self) -> None:
        """Close every connection."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def pull(self, *, step: int | None = None, round_: int | None = None) -> Pulled:
        """Pull every variable from all shards, at once.

        Parameters
        ----------
        step : int, optional
            The step that the weights are for; shards with delay compensation remember them under it.
        round_ : int, optional
            In `sync:N`: the round whose starting weights are wanted (P11).

        Raises
        ------
        Redo
            If the view is old (`StaleIncarnation`, `StalePlan`) or the round is over (`StaleRound`).
        RetryLater
            If a shard gave no answer within the retry budget.
        """
        view = self.view
        vectors = [np.empty(self._plan.shard_elements(shard), np.float32) for shard in range(len(view.addresses))]
        versions: list[int | None] = [None] * len(vectors)
        for run, frame in self._in_flight(self._runs(view, step, round_), lambda run: self._pull(run, view)):
            weights, shard = wire.decode_weights(frame), run.target.shard
            content = vectors[shard].data.cast("B")
            if weights.values.nbytes != run.length_bytes:
                raise MalformedFrame(
                    f"shard {shard} was asked for {run.length_bytes} bytes and sent {weights.values.nbytes}"
                )
            content[run.offset_bytes : run.offset_bytes + run.length_bytes] = weights.values
            known = versions[shard]
            versions[shard] = weights.version if known is None else min(known, weights.version)
        return Pulled(self._joined(vectors), tuple(version or 0 for version in versions), view.incarnations)

    def push(
        self, step: int, gradients: Mapping[str, Float32s], pulled: Pulled | None, *, skipped: bool = False
    ) -> Pushed:
        """Push a step's gradients to all shards, at once; return every shard's receipt.

        Parameters
        ----------
        step : int
            The push's identity (P1).
        gradients : mapping of str to ndarray of float32
            By variable, in the declared shapes, finite (P6); a variable left out has a zero gradient.
        pulled : Pulled, optional
            What the gradients were computed at; None: unknown.
        skipped : bool
            True: the empty push of a step that was given up.

        Raises
        ------
        InvalidRequest
            If a shard refuses the gradient; the same push never succeeds.
        Redo
            If the view is old, or the round is over: the step is in already, or is due again.
        RetryLater
            If a shard gave no receipt within the retry budget. Other shards may have the step; that is safe.
        """
        self._check(gradients)
        view = self.view
        # Shards are settled in index order by everybody: with any other order two workers could each hold the last room
        # of one shard's queue and wait for the other's.
        pushes = [self._prepare(shard, view, step, gradients, pulled, skipped) for shard in range(len(view.addresses))]
        replies: list[Reply] = []
        for push in pushes:
            if replies:
                failpoints.hit("worker.push.between_shards")
            replies.append(self._push(push.chunk(0), view))
        receipts = tuple(self._finish(push, reply, view) for push, reply in zip(pushes, replies, strict=True))
        return Pushed(receipts, view.incarnations)

    # --- pull ---

    def _runs(self, view: View, step: int | None, round_: int | None) -> list[PullRun]:
        """Return what to ask for, the shards taking turns, so that all of them are busy."""
        sizes = [self._plan.shard_elements(shard) * ELEMENT_BYTES for shard in range(len(view.addresses))]
        targets = [self._target(shard, view) for shard in range(len(sizes))]
        return [
            PullRun(targets[shard], round_, step, offset, min(CHUNK_BYTES_MAX, size_bytes - offset))
            for offset in range(0, max(sizes, default=0) or 1, CHUNK_BYTES_MAX)
            for shard, size_bytes in enumerate(sizes)
            if offset < max(size_bytes, 1)  # an empty shard is asked too: its version and its round matter
        ]

    def _joined(self, vectors: Sequence[Float32s]) -> dict[str, Float32s]:
        """Return variables by name: views of the vectors where a variable is in one piece, else copies."""
        pieces: dict[str, list[tuple[int, Float32s]]] = {}
        for vector, layout in zip(vectors, self._plan.layouts, strict=True):
            for placed in layout:
                run = vector[placed.offset : placed.stop]
                pieces.setdefault(placed.partition.variable, []).append((placed.partition.row_start, run))
        variables = {}
        for name, runs in pieces.items():
            runs.sort(key=lambda piece: piece[0])
            flat = runs[0][1] if len(runs) == 1 else np.concatenate([run for _, run in runs])
            variables[name] = flat.reshape(self._plan.variables[name].shape)
        return variables

    # --- push ---

    def _check(self, gradients: Mapping[str, Float32s]) -> None:
        """Refuse what would be cut into rows that mean something else, before the first shard is sent anything."""
        for name, gradient in gradients.items():
            variable = self._plan.variables.get(name)
            if variable is None:
                raise UnknownVariable(f"a gradient for {name!r}, which is none of the job's variables")
            if np.shape(gradient) != variable.shape:
                raise ShapeMismatch(
                    f"the gradient of {name!r} has shape {np.shape(gradient)}, the variable has {variable.shape}"
                )

    def _prepare(
        self,
        shard: int,
        view: View,
        step: int,
        gradients: Mapping[str, Float32s],
        pulled: Pulled | None,
        skipped: bool,
    ) -> ShardPush:
        slices = tuple(s for s in self._slices[shard] if s.partition.variable in gradients)
        runs = [
            np.asarray(gradients[s.partition.variable], np.float32)[
                s.partition.row_start : s.partition.row_stop
            ].ravel()
            for s in slices
        ]
        content = np.concatenate(runs) if runs else np.empty(0, np.float32)
        known = pulled is not None and pulled.incarnations[shard] == view.incarnations[shard]  # P16
        version = pulled.versions[shard] if pulled is not None and known else None
        return ShardPush(self._target(shard, view), self._worker, step, slices, skipped, version, content)

    def _finish(self, push: ShardPush, first: Reply, view: View) -> Receipt:
        for _ in range(WHOLE_ATTEMPTS_MAX):
            try:
                receipt = self._send_rest(push, first, view)
            except UnknownAttempt:  # P4: the assembly is gone; send it again whole
                push.attempt = new_attempt()
                first = self._push(push.chunk(0), view)
                continue
            return receipt
        raise UnknownAttempt(f"step {push.step}: the shard lost {WHOLE_ATTEMPTS_MAX} attempts in a row")

    def _send_rest(self, push: ShardPush, first: Reply, view: View) -> Receipt:
        receipt = self._receipt(push.chunk(0), first, view)
        if receipt.result is not PushResult.PENDING:
            return receipt
        frames = self._in_flight(self._rest(push), lambda chunk: self._push(chunk, view))
        receipts = [wire.decode_receipt(frame) for _, frame in frames]
        done = [r for r in receipts if r.result is not PushResult.PENDING]
        if not done:
            raise UnknownAttempt(f"step {push.step}: every chunk is in and the push is not")
        return next((r for r in done if r.result is not PushResult.DUPLICATE), done[0])

    def _rest(self, push: ShardPush) -> Iterator[PushChunk]:
        for index in range(1, push.chunks):
            failpoints.hit("worker.push.between_chunks")
            yield push.chunk(index)

    def _receipt(self, chunk: PushChunk, reply: Reply, view: View) -> Receipt:
        return wire.decode_receipt(self._settled(reply, lambda: self._push(chunk, view)))

    # --- both ---

    def _in_flight(
        self, requests: Iterable[_Request], send: Callable[[_Request], Reply]
    ) -> Iterator[tuple[_Request, bytes]]:
        """Send requests, at most IN_FLIGHT_MAX at a time (P19); yield each with its answer, in order."""
        waiting: deque[tuple[_Request, Reply]] = deque()
        for request in requests:
            if len(waiting) == IN_FLIGHT_MAX:
                yield self._answered(waiting.popleft(), send)
            waiting.append((request, send(request)))
        while waiting:
            yield self._answered(waiting.popleft(), send)

    def _answered(self, waiting: tuple[_Request, Reply], send: Callable[[_Request], Reply]) -> tuple[_Request, bytes]:
        request, reply = waiting
        return request, self._settled(reply, lambda: send(request))

    def _settled(self, reply: Reply, again: Callable[[], Reply]) -> bytes:
        """Wait for a reply; while the shard asks for patience, send again, within the budget."""
        try:
            return reply.result()
        except RetryLater:
            retrying = tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(RetryLater),
                wait=tenacity.wait_random_exponential(RETRY_PAUSE_S, RETRY_PAUSE_MAX_S),
                sleep=tenacity.sleep_using_event(self._giving_up),
                stop=tenacity.stop_after_delay(self._retry_budget_s)
                | tenacity.stop_when_event_set(self._giving_up)
                | _StopWhenAway(self._away_budget_s),
                reraise=True,
            )
            return retrying(lambda: again().result())

    def _push(self, chunk: PushChunk, view: View) -> Reply:
        return self._transport(chunk.target.shard, view).push(wire.encode_push(chunk), rpc.DATA_DEADLINE_S)

    def _pull(self, run: PullRun, view: View) -> Reply:
        return self._transport(run.target.shard, view).pull(wire.encode_pull(run), rpc.DATA_DEADLINE_S)

    def _transport(self, shard: int, view: View) -> Transport:
        transport = self._transports.get(view.addresses[shard])
        if transport is None:
            raise StaleIncarnation(f"shard {shard} moved from {view.addresses[shard]} while a request was prepared")
        return transport

    def _target(self, shard: int, view: View) -> Target:
        return Target(self._run_id, self._job_digest, self._plan.version, shard, view.incarnations[shard])

    def _trainable_slices(self, layout: Sequence[Placed]) -> tuple[Slice, ...]:
        variables = self._plan.variables
        return tuple(
            Slice(placed.partition, variables[placed.partition.variable].row_elements)
            for placed in layout
            if not variables[placed.partition.variable].frozen
        )
