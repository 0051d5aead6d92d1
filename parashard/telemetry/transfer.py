"""Figures of workers' and shards' transfers: how much overlapped with computing, how much was not sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2


class Overlap(NamedTuple):
    """Overlap of pulls and pushes with computing."""

    transfer_s: float  # sum of the durations of all workers' pulls and pushes, even where several ran at once
    waited_s: float  # time in which step loops only waited for one of them
    compute_s: float = 0.0  # time in which they computed

    @classmethod
    def of(cls, phases: Iterable[pb.PhaseSeconds]) -> Overlap:
        """Return the overlap of several workers together, from the phases of each."""
        counted = list(phases)
        waited_s = sum(p.pull + p.push for p in counted)
        return cls(sum(p.transfer for p in counted), waited_s, sum(p.compute for p in counted))

    @property
    def share(self) -> float | None:
        """The share of the transfer that overlapped with computing, from 0 to 1; None where nothing was transferred."""
        # 0 with `pipeline_depth = 0`, where a loop waits for all of it.
        if self.transfer_s <= 0:
            return None
        return min(1.0, max(0.0, 1.0 - self.waited_s / self.transfer_s))

    @property
    def step_share(self) -> float | None:
        """The transfers' share of a step in which nothing overlaps; None before there was one."""
        step_s = self.transfer_s + self.compute_s
        return self.transfer_s / step_s if step_s > 0 else None

    @property
    def hideable_share(self) -> float:
        """The share of such a step that a pipeline could hide: the shorter of transfer and computing."""
        return min(self.transfer_s, self.compute_s) / (self.transfer_s + self.compute_s or 1.0)


class Bytes(NamedTuple):
    """Payload between workers and shards."""

    pushed: int
    pushed_float32: int  # size of the accepted pushes if every gradient had travelled as float32
    pulled: int
    pull_unmoved: int  # asked for by pulls and not sent, because the worker had it already

    @classmethod
    def of(cls, records: Iterable[shard_pb2.InspectReply]) -> Bytes:
        """Return the sums over shards with these records."""
        counted = list(records)
        return cls(
            sum(r.push_bytes for r in counted),
            sum(r.push_float32_bytes for r in counted),
            sum(r.pull_bytes for r in counted),
            sum(r.pull_unmoved_bytes for r in counted),
        )

    @property
    def saved_share(self) -> float | None:
        """The share of all that was not sent; below 0 where encodings cost more than they save, None where all is 0."""
        whole = self.pushed_float32 + self.pulled + self.pull_unmoved
        return 1.0 - (self.pushed + self.pulled) / whole if whole else None
