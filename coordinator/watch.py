"""Watch: looks at every shard once a second, for the status, the history and the metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.membership import ShardLife
from coordinator.shard_says import ShardRecord, record_of
from coordinator.shard_stubs import ShardStubs
from parashard import rpc
from parashard.errors import ParashardError
from protos import shard_pb2

DEADLINE_S = 1.0


@dataclass(frozen=True)
class Silence:
    """How long a shard has not answered, and what came instead of its last answer."""

    silent_s: float
    error: ParashardError


class ShardWatch:
    """Asks shards for their records.

    Parameters
    ----------
    run_id : str
        What the shards must be of.
    stubs : ShardStubs
        Who reaches them.
    """

    def __init__(self, run_id: str, stubs: ShardStubs) -> None:
        self._request = shard_pb2.InspectRequest(run_id=run_id)
        self._stubs = stubs
        self._silent_since_s: dict[int, float] = {}

    def look(self, lives: list[ShardLife], saw: Callable[[int, ShardRecord], None], now_s: float) -> dict[int, Silence]:
        """Ask every shard at once and hand on each record; return the shards that did not answer, by index."""
        self._stubs.keep(lives)
        calls = [(life, self._stubs.of(life).Inspect.future(self._request, timeout=DEADLINE_S)) for life in lives]
        silent = {}
        for shard, (life, call) in enumerate(calls):
            try:
                with rpc.our_errors(life.address):
                    saw(shard, record_of(shard, call.result()))
            except ParashardError as error:
                since_s = self._silent_since_s.setdefault(shard, now_s)
                silent[shard] = Silence(now_s - since_s, error)
            else:
                self._silent_since_s.pop(shard, None)
        return silent
