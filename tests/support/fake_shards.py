"""FakeShards: shards as the coordinator's channels reach them, without processes: they say what a test has put there.

Stands in for `parashard_coordinator.shards.ShardChannels`. Each shard answers at once, whichever incarnation
of it is asked. Knows no core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from parashard._proto import shard_pb2
from parashard.checkpoints.manifest import ShardPart
from parashard.errors import ParashardError
from parashard_coordinator.core.membership import ShardRegistration

Interval = tuple[int, int]


class Answered:
    """A call that is over: its value, or its error."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def result(self) -> Any:
        """Return the reply, or raise the error."""
        return self._answer()


class FakeShards:
    """Channels to shards that have saved these parts.

    Parameters
    ----------
    save : callable
        Called with what a shard is asked to save; returns its part, and the steps in it.

    Attributes
    ----------
    refusal : ParashardError or None
        What every command is answered with, if anything.
    """

    def __init__(self, save: Callable[[shard_pb2.TakeCheckpointRequest], tuple[ShardPart, Sequence[Interval]]]) -> None:
        self._save = save
        self.refusal: ParashardError | None = None

    def of(self, registration: ShardRegistration) -> Any:
        """Return a stub; its shard is known by its address, which begins with `shard-INDEX:`."""
        index = int(registration.address.partition(":")[0].rpartition("-")[2])

        def inspect(request: shard_pb2.InspectRequest) -> shard_pb2.InspectReply:
            return shard_pb2.InspectReply(shard=index, incarnation=registration.incarnation)

        def take(request: shard_pb2.TakeCheckpointRequest) -> shard_pb2.TakeCheckpointReply:
            part, applied = self._save(request)
            intervals = [shard_pb2.Interval(start=start, stop=stop) for start, stop in applied]
            return shard_pb2.TakeCheckpointReply(
                folder=part.name, manifest_bytes=part.size_bytes, manifest_sha256=part.sha256, applied=intervals
            )

        def roll_back(request: shard_pb2.RollbackRequest) -> shard_pb2.RollbackReply:
            return shard_pb2.RollbackReply()

        calls = {"Inspect": inspect, "TakeCheckpoint": take, "Rollback": roll_back}
        return SimpleNamespace(**{name: SimpleNamespace(future=self._call(call)) for name, call in calls.items()})

    def keep(self, registrations: Iterable[ShardRegistration]) -> None:
        """Close nothing: there are no channels."""

    def _call(self, call: Callable[[Any], Any]) -> Callable[..., Answered]:
        def future(request: Any, timeout: float) -> Answered:
            def answer() -> Any:
                if self.refusal is not None and not isinstance(request, shard_pb2.InspectRequest):
                    raise self.refusal
                return call(request)

            return Answered(answer)

        return future
