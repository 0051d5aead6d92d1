"""Both ends of a transport, as the conformance tests of all transports hold them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parashard.plan.embedding import Keys, mixed
from parashard.protocol.buffers import Buffers
from parashard.protocol.messages import PresentRows, PullRun, Push, PushResult, Slice, Weights
from parashard.transports.base import Pending, Transport
from support.fake_plane import TARGET, FakePlane
from support.transport_peers import Peer
from support.waiting import DEADLINE_S

OFFSETS = [0, 1000, 1001, 3000]  # of the partitions, in elements
ELEMENTS = OFFSETS[-1]
METHODS = ("push", "pull", "pull_rows")


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
        elif method == "pull_rows":
            pending = self.transport.pull_rows(rows_of({"user": keys_of(1, 2)}, **more), kept, deadline_s)
        else:
            into = np.empty(4 * ELEMENTS, np.uint8) if into is None else into
            pending = self.transport.pull(pull_of(0, into.nbytes, **more), Buffers([into]), deadline_s)
        pending.start()
        return pending

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


def kept(weights: Weights) -> Weights:
    """Return rows that outlast their reading."""
    copies = {name: PresentRows(rows.present.copy(), rows.values.copy()) for name, rows in weights.rows.items()}
    return Weights(weights.version, (), copies)


def rows_of(keys: Mapping[str, Keys], step: int = 1) -> PullRun:
    return PullRun(TARGET, None, step, 0, 0, keys=keys)


def pull_of(begin: int, end: int, step: int = 1, **more: Any) -> PullRun:
    return PullRun(TARGET, None, step, begin, end - begin, **more)
