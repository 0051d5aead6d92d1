"""Figures of the transfers that workers and shards have counted: how much overlapped, how much was not sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2


class Overlap(NamedTuple):
    """Pulling and pushing beside computing."""

    transfer_s: float  # duration of every pull and every push, added up also where several ran at once; of all workers
    waited_s: float  # how long step loops did nothing but wait for one of them
    compute_s: float = 0.0  # how long they computed

    @classmethod
    def of(cls, phases: Iterable[pb.PhaseSeconds]) -> Overlap:
        """Return the overlap of workers with these phases together."""
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
        """What transfers take of a step in which nothing overlaps; None before there was one."""
        step_s = self.transfer_s + self.compute_s
        return self.transfer_s / step_s if step_s > 0 else None

    @property
    def hideable_share(self) -> float:
        """What a pipeline could take off such a step: the shorter of transfer and computing."""
        return min(self.transfer_s, self.compute_s) / (self.transfer_s + self.compute_s or 1.0)


class Bytes(NamedTuple):
    """Payload between workers and shards."""

    pushed: int
    pushed_float32: int  # what the pushes that were taken would have been, had every gradient travelled as float32
    pulled: int
    pull_unmoved: int  # what pulls asked for and were not sent, because the worker had it already

    @classmethod
    def of(cls, records: Iterable[shard_pb2.InspectReply]) -> Bytes:
        """Return what shards with these records have taken and sent together."""
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
