"""Served: the shard that this process serves now. A rollback replaces it as a whole, between two requests (P12)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from parashard.errors import QueueFull
from ps_server.owner import Owner
from ps_server.shard import Shard

_Result = TypeVar("_Result")
TURN_S = 5.0


class Served:
    """A shard and the owner that lets one request at a time touch it.

    Parameters
    ----------
    shard : Shard
        The first life.
    owner : Owner
        The process's one owner.
    restored : str
        What the life began from, for people.
    """

    def __init__(self, shard: Shard, owner: Owner, restored: str) -> None:
        self.shard = shard
        self.owner = owner
        self.restored = restored
        self.changed = threading.Event()
        """Set by a rollback, so that the new life is announced at once."""

    def alone(self, call: Callable[[Shard], _Result], timeout_s: float = TURN_S) -> _Result:
        """Run a call of this process's own on the shard, however long the line is.

        Raises
        ------
        QueueFull
            If no turn came within `timeout_s`; the call has not run.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self.owner.run(lambda: call(self.shard), max(0.0, deadline_s - time.monotonic()))
            except QueueFull:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(0.001)  # the line was full; its places are freed by requests, within milliseconds

    def replace(self, shard: Shard, restored: str, *, taking_over: Callable[[Shard], None]) -> None:
        """Serve another life from now on; requests that name the earlier one are refused.

        `taking_over` is called with the new life between the two, while nobody is served.
        """

        def swap(earlier: Shard) -> None:
            earlier.assemblies.clear()  # no chunk that names it is taken any more
            taking_over(shard)
            self.shard, self.restored = shard, restored

        self.alone(swap)
        self.changed.set()

    def go_on(self, begin: Callable[[Shard], None], restored: str) -> None:
        """Let the shard go on as another life of its own, by `begin`, while nobody is served."""

        def change(shard: Shard) -> None:
            begin(shard)
            self.restored = restored

        self.alone(change)
        self.changed.set()
