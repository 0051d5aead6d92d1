"""The coordinator as a client of shards: polls each once a second, and has them save or roll back.

Every command names the incarnations of the coordinator and of the shard. Only the coordinator's main thread sends,
never under the core's lock. Owns the bounds of a shard's messages, before the coordinator keeps or forwards them.
Decides nothing about the job.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2, shard_pb2_grpc
from parashard.checkpoints.catalogue import shard_folder
from parashard.checkpoints.manifest import ShardPart
from parashard.client.proto_conversion import intervals_from
from parashard.errors import LimitExceeded, MalformedFrame, ParashardError
from parashard.frozen_model import first_problem
from parashard.plan.intervals import IntervalSet
from parashard.process.backoff import Debounce
from parashard.protocol import rpc
from parashard.security.credentials import Credentials
from parashard_coordinator.core.calls import Announcement
from parashard_coordinator.core.input_limits import (
    PATH_BYTES_MAX,
    REASON_BYTES_MAX,
    checked_address,
    checked_text,
    readable,
)
from parashard_coordinator.core.membership import ShardRegistration

INTERVALS_MAX = 1 << 15  # in a shard's applied steps, and in its held ones; each gap is an outstanding lease
ROUNDS_MAX = 1 << 16  # that a shard can roll back to
TABLES_MAX = 1 << 8  # embedding tables of a job
HOTTEST_MAX = 5  # most frequently pushed keys of a table
STALENESS_VALUES_MAX = 1 << 12  # distinct staleness values of a shard
ERROR_BYTES_MAX = 300  # of a text in a shard's record, such as an error: a status has these of every shard

_FIGURES = tuple(
    field.name
    for field in shard_pb2.InspectReply.DESCRIPTOR.fields
    if isinstance(getattr(shard_pb2.InspectReply(), field.name), int | float | str)
)

TABLE_FIGURES = tuple(field.name for field in shard_pb2.TableFigures.DESCRIPTOR.fields if field.name != "hottest_keys")


class ShardRecord(NamedTuple):
    """A shard's own record, bounded in size."""

    figures: shard_pb2.InspectReply  # without its lists
    steps_applied: int  # how many steps are in the weights
    staleness: Counter[int]  # pushes by staleness
    tables: tuple[shard_pb2.TableFigures, ...] = ()  # its rows of embedding tables


class SavedShard(NamedTuple):
    """A shard's report of a checkpoint that it took."""

    part: ShardPart  # its location, as in the manifest of a drained checkpoint
    applied: IntervalSet  # the steps in it
    skipped: IntervalSet  # its steps whose push was empty


def announcement(request: pb.RegisterShardRequest) -> Announcement:
    """Convert a RegisterShardRequest message into an Announcement."""
    _check_counts(request)
    check_count("skipped", request.skipped, INTERVALS_MAX)
    check_count("chain_rounds", request.chain_rounds, ROUNDS_MAX)
    registration = ShardRegistration(
        request.incarnation,
        checked_address(request.address, "address"),
        checked_address(request.http_address, "http_address"),
        checked_address(request.data_address, "data_address"),
        checked_text(request.local_path, "local_path", PATH_BYTES_MAX),
    )
    return Announcement(
        registration,
        applied=intervals_from(request.applied),
        held=intervals_from(request.held or request.applied),
        skipped=intervals_from(request.skipped),
        returnable=frozenset(request.checkpoint_rounds),
        chains=frozenset(request.chain_rounds),
        restored=readable(request.restored, REASON_BYTES_MAX),
        first_incarnation=request.first_incarnation,
    )


def record_of(shard: int, reply: shard_pb2.InspectReply) -> ShardRecord:
    """Convert an InspectReply into the shard's record, after checking that this shard sent it."""
    if reply.shard != shard:
        raise MalformedFrame(f"shard {reply.shard} answers where shard {shard} should be")
    _check_counts(reply)
    check_count("staleness", reply.staleness, STALENESS_VALUES_MAX)
    check_count("tables", reply.tables, TABLES_MAX)
    for table in reply.tables:
        check_count("hottest_keys", table.hottest_keys, HOTTEST_MAX)
    # Copy into a new message: a decoded one keeps the memory of cleared fields, and unknown fields.
    return ShardRecord(
        figures=shard_pb2.InspectReply(**{name: _figure(name, getattr(reply, name)) for name in _FIGURES}),
        steps_applied=_length(reply.applied),
        staleness=Counter({count.staleness: count.pushes for count in reply.staleness}),
        tables=tuple(
            shard_pb2.TableFigures(
                **{name: _figure(name, getattr(table, name)) for name in TABLE_FIGURES},
                hottest_keys=[shard_pb2.HotKey(key=hot.key, pushes=hot.pushes) for hot in table.hottest_keys],
            )
            for table in reply.tables
        ),
    )


def saved_shard(plan_version: int, shard: int, reply: shard_pb2.TakeCheckpointReply) -> SavedShard:
    """Convert a TakeCheckpointReply, after checking that the shard owns the checkpoint's folder."""
    check_count("applied", reply.applied, INTERVALS_MAX)
    check_count("skipped", reply.skipped, INTERVALS_MAX)
    try:
        part = ShardPart(name=reply.folder, size_bytes=reply.manifest_bytes, sha256=reply.manifest_sha256)
    except ValueError as error:
        raise MalformedFrame(f"shard {shard}: no checkpoint is like that: {first_problem(error)}") from None
    if not part.name.startswith(f"{shard_folder(plan_version, shard)}/"):
        raise MalformedFrame(f"shard {shard} of plan {plan_version} does not save to {part.name}")
    return SavedShard(part, intervals_from(reply.applied), intervals_from(reply.skipped))


def check_count(what: str, entries: Any, most: int) -> None:
    """Raise `LimitExceeded` if a list has more than `most` entries."""
    if len(entries) > most:
        raise LimitExceeded(f"{what} has {len(entries)} entries; allowed are {most}")


def _check_counts(says: pb.RegisterShardRequest | shard_pb2.InspectReply) -> None:
    check_count("applied", says.applied, INTERVALS_MAX)
    check_count("held", says.held, INTERVALS_MAX)
    check_count("checkpoint_rounds", says.checkpoint_rounds, ROUNDS_MAX)


def _figure(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return readable(value, ERROR_BYTES_MAX)
    if not math.isfinite(value):
        raise MalformedFrame(f"{name} is {value}")
    return value


def _length(ascending: Iterable[shard_pb2.Interval]) -> int:
    """Return the number of steps in ascending intervals, without building a set."""
    length = stop = 0
    for interval in ascending:
        if not stop <= interval.start <= interval.stop:
            raise MalformedFrame(f"applied: [{interval.start}, {interval.stop}) comes after step {stop}")
        length, stop = length + interval.stop - interval.start, interval.stop
    return length


ANSWER_BYTES_MAX = 1 << 20
"""Enough for the largest list of intervals of a shard, of steps up to 2^35. Decoded, it can be 20 times as large."""


class ShardChannels:
    """gRPC stubs of shards, by address."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        self._credentials = credentials
        self._open: dict[str, tuple[Any, shard_pb2_grpc.ShardStub]] = {}  # channel and stub by address

    def of(self, registration: ShardRegistration) -> shard_pb2_grpc.ShardStub:
        """Return the stub of a shard's incarnation."""
        if registration.address not in self._open:
            channel = rpc.connect(registration.address, self._credentials, ANSWER_BYTES_MAX)
            self._open[registration.address] = channel, shard_pb2_grpc.ShardStub(channel)  # type: ignore[no-untyped-call]
        return self._open[registration.address][1]

    def keep(self, registrations: Iterable[ShardRegistration]) -> None:
        """Close the channels to all other incarnations: a restarted shard may have another port each time."""
        gone = self._open.keys() - {registration.address for registration in registrations}
        for address in gone:
            channel, _ = self._open.pop(address)
            channel.close()


INSPECT_DEADLINE_S = 1.0
NAME_DEADLINE_S = 1.0
ROLLBACK_DEADLINE_S = 20.0
SAVE_DEADLINE_S = 20.0  # then the command is retried: it returns a checkpoint that was stored meanwhile
NONE_DAMAGED: Mapping[int, str] = MappingProxyType({})


class Silence(NamedTuple):
    """How long an incarnation of a shard has not answered, and the last error."""

    incarnation: int
    silent_s: float
    error: ParashardError


class ShardControl:
    """Polls the registered incarnations of shards, and sends them commands."""

    def __init__(self, run_id: str, incarnation: int, plan_version: int, stubs: ShardChannels) -> None:
        self._run_id = run_id
        self._incarnation = incarnation
        self._plan_version = plan_version
        self._stubs = stubs
        self._silent_since_s: dict[tuple[int, int], float] = {}  # by shard and incarnation

    def look(
        self, registrations: list[ShardRegistration], saw: Callable[[int, ShardRecord], None], now_s: float
    ) -> dict[int, Silence]:
        """Poll every shard concurrently, pass each record to `saw`; return the shards that did not answer, by index."""
        self._stubs.keep(registrations)
        request = shard_pb2.InspectRequest(run_id=self._run_id)
        calls = [
            (registration, self._stubs.of(registration).Inspect.future(request, timeout=INSPECT_DEADLINE_S))
            for registration in registrations
        ]
        silent, since_s = {}, self._silent_since_s
        self._silent_since_s = {}
        for shard, (registration, call) in enumerate(calls):
            try:
                with rpc.our_errors(registration.address):
                    saw(shard, record_of(shard, call.result()))
            except ParashardError as error:
                key = shard, registration.incarnation
                self._silent_since_s[key] = since_s.get(key, now_s)
                silent[shard] = Silence(registration.incarnation, now_s - self._silent_since_s[key], error)
        return silent

    def save(
        self, registrations: Sequence[ShardRegistration], round_: int | None, damaged: Mapping[int, str] = NONE_DAMAGED
    ) -> list[SavedShard]:
        """Have every shard save its present state, in sync mode the start of a round; raise the first error."""
        saved = []
        calls = self._begin_saving(registrations, round_, SAVE_DEADLINE_S, damaged=damaged)
        for shard, (registration, call) in calls.items():
            with rpc.our_errors(registration.address):
                reply = call.result()
            saved.append(saved_shard(self._plan_version, shard, reply))
        return saved

    def name_round(self, registrations: Sequence[ShardRegistration], round_: int) -> dict[int, ParashardError]:
        """Have every shard save a round when it is reached; return the errors by shard."""
        return _errors(self._begin_saving(registrations, round_, NAME_DEADLINE_S, ahead=True))

    def roll_back(self, registrations: Mapping[int, tuple[ShardRegistration, int]]) -> dict[int, ParashardError]:
        """Roll shards back to rounds; return the errors by shard."""
        calls = {
            shard: (
                registration,
                self._stubs.of(registration).Rollback.future(
                    shard_pb2.RollbackRequest(
                        run_id=self._run_id,
                        incarnation=registration.incarnation,
                        coordinator_incarnation=self._incarnation,
                        round=round_,
                        shard=shard,
                    ),
                    timeout=ROLLBACK_DEADLINE_S,
                ),
            )
            for shard, (registration, round_) in registrations.items()
        }
        return _errors(calls)

    def _begin_saving(
        self,
        registrations: Sequence[ShardRegistration],
        round_: int | None,
        deadline_s: float,
        *,
        ahead: bool = False,
        damaged: Mapping[int, str] = NONE_DAMAGED,
    ) -> dict[int, tuple[ShardRegistration, Any]]:
        """Tell every shard to save; return the calls in progress by shard."""
        calls = {}
        for shard, registration in enumerate(registrations):
            request = shard_pb2.TakeCheckpointRequest(
                run_id=self._run_id,
                incarnation=registration.incarnation,
                coordinator_incarnation=self._incarnation,
                round=round_,
                ahead=ahead,
                shard=shard,
                damaged=damaged.get(shard, ""),
            )
            calls[shard] = registration, self._stubs.of(registration).TakeCheckpoint.future(request, timeout=deadline_s)
        return calls


def _errors(calls: Mapping[int, tuple[ShardRegistration, Any]]) -> dict[int, ParashardError]:
    """Wait for calls, and return their errors by shard."""
    errors = {}
    for shard, (registration, call) in calls.items():
        try:
            with rpc.our_errors(registration.address):
                call.result()
        except ParashardError as error:
            errors[shard] = error
    return errors


class DiskTroubles:
    """The present disk failures of shards."""

    def __init__(self) -> None:
        self._checkpoints: defaultdict[int, Debounce] = defaultdict(Debounce)

    def changed(self, shard: int, figures: shard_pb2.InspectReply, now_s: float) -> tuple[str, str, bool] | None:
        """Return the failure that is present or has just ended (key, text, whether it is over), or None."""
        # A restarted process ends its predecessor's failure only once it has stored a checkpoint itself.
        if figures.checkpoint_error:
            self._checkpoints[shard].begins(now_s)
            return f"checkpoint-{shard}", f"shard-{shard}: checkpoint failed: {figures.checkpoint_error}", False
        if figures.checkpoints and self._checkpoints[shard].ends(now_s):
            return f"checkpoint-{shard}", f"shard-{shard}: checkpoints are saved again", True
        return None
