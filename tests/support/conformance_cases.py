"""Both ends of a transport, as the conformance tests of all transports hold them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parashard.plan.embedding import Keys, mixed
from parashard.protocol.messages import NO_KEYS, Buffers, FoundRows, PullRun, Push, PushResult, Slice
from parashard.transports.base import Pending, Transport
from support.fake_plane import TARGET, FakePlane
from support.transport_peers import Peer
from support.waiting import DEADLINE_S

OFFSETS = [0, 1000, 1001, 3000]  # of the partitions, in elements
ELEMENTS = OFFSETS[-1]
METHODS = ("push", "pull", "pull of rows")


@dataclass
class Talk:
    """Both ends."""

    peer: Peer
    transport: Transport

    def __post_init__(self) -> None:
        self.hold, self.held = threading.Event(), threading.Event()

    @property
    def plane(self) -> FakePlane:
        return self.peer.plane

    def begin(self, method: str, into: Any = None, deadline_s: float = DEADLINE_S, **more: Any) -> Pending[Any]:
        pending: Pending[Any]
        if method == "push":
            pending = self.transport.push(push_of(np.ones(4, np.float32), **more), deadline_s)
        else:
            into = np.empty(4 * ELEMENTS, np.uint8) if into is None else into
            keys = {"user": keys_of(1, 2)} if method == "pull of rows" else NO_KEYS
            run = pull_of(0, into.nbytes, keys=keys, **more)
            pending = self.transport.pull(run, Buffers([into]), deadline_s, lambda rows: None)
        pending.start()
        return pending

    def rows(self, keys: Mapping[str, Keys], into: Any = None, **more: Any) -> tuple[int, dict[str, FoundRows]]:
        """Return the version and copies of rows that a pull brings, together with a run or without."""
        copies: dict[str, FoundRows] = {}

        def read(rows: Mapping[str, FoundRows]) -> None:
            copies.update({name: FoundRows(of.present.copy(), of.values.copy()) for name, of in rows.items()})

        into = np.empty(0, np.uint8) if into is None else into
        run = pull_of(0, into.nbytes, keys=keys, **more)
        return self.transport.pull(run, Buffers([into]), DEADLINE_S, read).result().version, copies

    def still_talks(self) -> bool:
        """Return whether both methods do what they should, after whatever was."""
        self.plane.before = lambda request: None
        into = np.zeros(ELEMENTS, np.float32)
        assert self.begin("push", step=99).result().result is PushResult.APPLIED
        self.begin("pull", into).result()
        return np.array_equal(into, self.plane.memory.weights)

    def hold_up(self, step: int | None = None) -> None:
        """Let requests, of this step or any, wait until `hold` is set, or the test is over."""

        def before(request: Push | PullRun) -> None:
            if step is None or request.step == step:
                self.held.set()
                self.hold.wait(DEADLINE_S)

        self.plane.before = before


def push_of(*pieces: Any, step: int = 1, slices: tuple[Slice, ...] = ()) -> Push:
    return Push(TARGET, "worker-0", step, slices, False, 5, Buffers([np.asarray(piece).data for piece in pieces]))


def keys_of(*ids: int) -> Keys:
    return np.sort(mixed(np.array(ids, np.int64)))


def pull_of(begin: int, end: int, step: int = 1, **more: Any) -> PullRun:
    return PullRun(TARGET, None, step, begin, end - begin, **more)
