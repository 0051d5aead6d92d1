"""What a shard says of itself is bounded before any of it is kept or shown: in number, in size and in kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from parashard._proto import shard_pb2, shard_pb2_grpc
from parashard.errors import LimitExceeded, MalformedFrame, ParashardError
from parashard.plan.intervals import IntervalSet
from parashard.protocol import wire
from parashard.protocol.rpc import Server
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.shards import (
    ANSWER_BYTES_MAX,
    ERROR_BYTES_MAX,
    HOTTEST_MAX,
    INTERVALS_MAX,
    ROUNDS_MAX,
    STALENESS_VALUES_MAX,
    TABLES_MAX,
    ShardChannels,
    ShardControl,
    record_of,
)
from parashard_server.core.shard import STALENESS_MAX
from parashard_server.state.rows import table_rows
from support.coordinator_cases import core_of
from support.shard_records import largest_record, told

SCATTERED = [shard_pb2.Interval(start=step, stop=step + 1) for step in range(0, 2 * INTERVALS_MAX + 2, 2)]
COUNTED = [shard_pb2.StalenessCount(staleness=value, pushes=1 << 40) for value in range(STALENESS_VALUES_MAX + 1)]
UNKNOWN = b"\xfa\x3e\x80\x80\x10" + bytes(1 << 18)  # field 1007, of 256 KiB: no version of ours has it
FULL = told(
    0,
    held=SCATTERED[:INTERVALS_MAX],
    checkpoint_rounds=range(ROUNDS_MAX),
    checkpoint_error="x\x1b[2J" * 1000,
    checkpoint_s=1e300,
)
FULL.applied.extend(SCATTERED[:INTERVALS_MAX])
FULL.staleness.extend(COUNTED[:STALENESS_VALUES_MAX])


class Liar(shard_pb2_grpc.ShardServicer):  # type: ignore[misc, unused-ignore]
    """Answers with whatever it is told to."""

    def __init__(self) -> None:
        self.says = told(0)
        self.saves = shard_pb2.TakeCheckpointReply()

    def Inspect(self, request: shard_pb2.InspectRequest, context: Any) -> shard_pb2.InspectReply:
        return self.says

    def TakeCheckpoint(self, request: shard_pb2.TakeCheckpointRequest, context: Any) -> shard_pb2.TakeCheckpointReply:
        return self.saves


class Watched:
    """A shard that lies, who looks at it, and what is kept of it."""

    def __init__(self, liar: Liar, address: str) -> None:
        self.liar = liar
        self.stubs = ShardChannels()
        self.status = StatusView("digits", "async")
        self.registration = ShardRegistration(1, address, "")
        self.client = ShardControl("run-1", 1, 7, self.stubs)

    def look(self, says: shard_pb2.InspectReply) -> ParashardError | None:
        """Look once; return why the answer did not count."""
        self.liar.says = says
        silence = self.client.look([self.registration], self.status.saw, 0.0).get(0)
        return silence and silence.error


@pytest.fixture
def it() -> Iterator[Watched]:
    server, liar = Server("127.0.0.1:0"), Liar()
    shard_pb2_grpc.add_ShardServicer_to_server(liar, server.grpc)  # type: ignore[no-untyped-call]
    server.start()
    watched = Watched(liar, server.address)
    yield watched
    watched.stubs.keep([])
    server.stop(grace_s=0.0)


def test_of_the_most_that_a_shard_may_say_the_figures_are_kept_and_shown() -> None:
    whole = shard_pb2.InspectReply.FromString(FULL.SerializeToString() + UNKNOWN)
    record = record_of(0, whole)
    assert (record.steps_applied, len(record.staleness)) == (INTERVALS_MAX, STALENESS_VALUES_MAX)
    assert (record.figures.shard, record.figures.checkpoint_s) == (0, 1e300)
    error = record.figures.checkpoint_error
    assert error.isprintable()
    assert len(error) == ERROR_BYTES_MAX
    assert record.figures.ByteSize() < 1024, "no lists and no unknown fields"
    status = StatusView("digits", "async")
    status.saw(0, record)
    shown = status.message(core_of().job, 0.0)
    assert shown.shards[0].steps_applied == INTERVALS_MAX
    assert shown.ByteSize() < 4096


def test_every_figure_of_a_record_is_kept() -> None:
    fields = shard_pb2.InspectReply.DESCRIPTOR.fields
    shown = {field.name for field, _ in largest_record(1).figures.ListFields()}
    assert {field.name for field in fields} - shown == {"applied", "held", "checkpoint_rounds", "staleness", "tables"}
    assert len(largest_record(1).tables) == TABLES_MAX


def test_a_shard_tells_no_more_values_of_staleness_than_there_may_be() -> None:
    assert STALENESS_MAX + 1 == STALENESS_VALUES_MAX


@pytest.mark.parametrize(
    ("field", "entries"),
    [
        ("applied", SCATTERED),
        ("held", SCATTERED),
        ("checkpoint_rounds", range(ROUNDS_MAX + 1)),
        ("staleness", COUNTED),
    ],
)
def test_too_long_a_list_is_refused(it: Watched, field: str, entries: Any) -> None:
    error = it.look(shard_pb2.InspectReply(**{field: entries}))
    assert isinstance(error, LimitExceeded)
    assert f"{field} has {len(entries)} entries; allowed are {len(entries) - 1}" in str(error)
    assert it.status.records() == {}


def test_a_shard_cannot_speak_for_others_nor_be_many(it: Watched) -> None:
    assert it.look(told(0, 3)) is None
    for shard in (1, 2, 1 << 31):
        assert isinstance(it.look(told(shard, 9)), MalformedFrame)
    assert {shard: record.figures.version for shard, record in it.status.records().items()} == {0: 3}


def test_a_table_tells_of_no_more_hottest_keys_than_there_may_be(it: Watched) -> None:
    hottest = [shard_pb2.HotKey(key=key, pushes=1) for key in range(HOTTEST_MAX + 1)]
    error = it.look(shard_pb2.InspectReply(tables=[shard_pb2.TableFigures(table="user", hottest_keys=hottest)]))
    assert isinstance(error, LimitExceeded)
    assert f"hottest_keys has {HOTTEST_MAX + 1} entries; allowed are {HOTTEST_MAX}" in str(error)
    assert HOTTEST_MAX == table_rows.HOTTEST_MAX


def test_the_most_intervals_and_values_fit_into_an_answer() -> None:
    far = [shard_pb2.Interval(start=(1 << 34) + i.start, stop=(1 << 34) + i.stop) for i in SCATTERED[:INTERVALS_MAX]]
    reply = shard_pb2.InspectReply(applied=far, held=far, staleness=COUNTED[:STALENESS_VALUES_MAX])
    assert reply.ByteSize() <= ANSWER_BYTES_MAX


def test_an_answer_over_the_bound_is_not_decoded(it: Watched) -> None:
    long = shard_pb2.InspectReply(checkpoint_error="x" * ANSWER_BYTES_MAX)
    assert long.ByteSize() < wire.FRAME_BYTES_MAX, "the shard's own bound lets it pass"
    error = it.look(long)
    assert isinstance(error, LimitExceeded)
    assert f"larger than max ({long.ByteSize()} vs. {ANSWER_BYTES_MAX})" in str(error)


def saved(**changed: Any) -> shard_pb2.TakeCheckpointReply:
    right = {"folder": "shards/p0007/s0000/i00000001-c00000002", "manifest_bytes": 9, "manifest_sha256": "e" * 64}
    return shard_pb2.TakeCheckpointReply(**(right | {"applied": [shard_pb2.Interval(start=0, stop=3)]} | changed))


def test_what_a_shard_says_of_its_checkpoint_is_taken_up(it: Watched) -> None:
    it.liar.saves = saved()
    (shard,) = it.client.save([it.registration], None)
    assert (shard.part.name, shard.part.size_bytes, shard.part.sha256) == (saved().folder, 9, "e" * 64)
    assert shard.applied == IntervalSet([(0, 3)])


@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        ({"applied": SCATTERED}, LimitExceeded, "applied has"),
        ({"folder": "../../etc"}, MalformedFrame, "shard 0: no checkpoint is like that: name: found"),
        ({"folder": saved().folder.replace("s0000", "s0001")}, MalformedFrame, "shard 0 of plan 7 does not save to"),
        ({"folder": saved().folder.replace("p0007", "p0006")}, MalformedFrame, "shard 0 of plan 7 does not save to"),
        ({"manifest_bytes": 1 << 63}, MalformedFrame, "size_bytes: found"),
        ({"manifest_sha256": "x"}, MalformedFrame, "sha256: found"),
        ({"applied": [shard_pb2.Interval(start=3, stop=0)]}, MalformedFrame, "an interval needs"),
    ],
)
def test_a_checkpoint_that_there_cannot_be_is_refused(it: Watched, changed: Any, error: type, told: str) -> None:
    it.liar.saves = saved(**changed)
    with pytest.raises(error, match=told):
        it.client.save([it.registration], None)


@pytest.mark.parametrize(
    "applied",
    [[(3, 2)], [(5, 6), (0, 1)], [(0, 4), (3, 5)]],
    ids=["backwards", "descending", "overlapping"],
)
def test_steps_that_are_no_steps_are_refused(applied: list[tuple[int, int]]) -> None:
    reply = shard_pb2.InspectReply(applied=[shard_pb2.Interval(start=a, stop=b) for a, b in applied])
    with pytest.raises(MalformedFrame, match="applied"):
        record_of(0, reply)


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_a_figure_that_json_has_not_is_refused(figure: float) -> None:
    with pytest.raises(MalformedFrame, match="checkpoint_stall_s is"):
        record_of(0, told(0, checkpoint_stall_s=figure))
