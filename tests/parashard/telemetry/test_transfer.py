"""Figures of the transfer: what overlapped is between nothing and all, and nothing is said of what was not measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.telemetry.transfer import Bytes, Overlap

SECONDS = st.floats(0.0, 1e6)


@pytest.mark.parametrize(
    ("transfer_s", "waited_s", "share"),
    [(0.0, 0.0, None), (0.0, 2.0, None), (4.0, 0.0, 1.0), (4.0, 1.0, 0.75), (4.0, 4.0, 0.0), (4.0, 4.1, 0.0)],
)
def test_transfer_time_without_a_wait_overlapped(transfer_s: float, waited_s: float, share: float | None) -> None:
    assert Overlap(transfer_s, waited_s).share == share


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), max_size=4))
def test_the_overlap_of_workers_is_of_all_their_seconds(workers: list[tuple[float, float, float]]) -> None:
    overlap = Overlap.of(pb.PhaseSeconds(lease=7, pull=a, compute=9, push=b, transfer=c) for a, b, c in workers)
    assert overlap.transfer_s == pytest.approx(sum(c for _, _, c in workers))
    assert overlap.waited_s == pytest.approx(sum(a + b for a, b, _ in workers))
    assert overlap.share is None or 0.0 <= overlap.share <= 1.0


def test_bytes_are_of_all_shards_together() -> None:
    records = [
        shard_pb2.InspectReply(push_bytes=1, push_float32_bytes=4, pull_bytes=2, pull_unmoved_bytes=6),
        shard_pb2.InspectReply(push_bytes=3, push_float32_bytes=12, pull_bytes=4, pull_unmoved_bytes=0),
    ]
    assert Bytes.of(records) == Bytes(pushed=4, pushed_float32=16, pulled=6, pull_unmoved=6)


@pytest.mark.parametrize(
    ("moved", "saved"),
    [
        (Bytes(0, 0, 0, 0), None),
        (Bytes(8, 8, 8, 0), 0.0),
        (Bytes(2, 8, 8, 0), 0.375),
        (Bytes(8, 8, 0, 8), 0.5),
        (Bytes(12, 8, 0, 0), -0.5),  # topk of more than half of the elements
    ],
)
def test_saved_is_the_share_of_all_that_was_not_sent(moved: Bytes, saved: float | None) -> None:
    assert moved.saved_share == saved


@pytest.mark.parametrize(
    ("transfer_s", "compute_s", "share", "hideable"),
    [(0.0, 0.0, None, 0.0), (3.0, 1.0, 0.75, 0.25), (1.0, 3.0, 0.25, 0.25), (2.0, 0.0, 1.0, 0.0), (0.0, 2.0, 0.0, 0.0)],
)
def test_transfers_take_a_share_of_a_step_and_the_shorter_part_can_be_hidden(
    transfer_s: float, compute_s: float, share: float | None, hideable: float
) -> None:
    overlap = Overlap(transfer_s, 0.0, compute_s)
    assert (overlap.step_share, overlap.hideable_share) == (share, hideable)
