"""HeldCalls: lease calls that wait at the coordinator, as the coordinator's service holds them, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sim_world import Promise, World

from parashard._proto import coordinator_pb2 as pb
from parashard_coordinator.core.calls import LeaseAnswer
from parashard_coordinator.core.core import Core
from parashard_coordinator.endpoints.service import lease_reply
from parashard_coordinator.exclusive_core import ExclusiveCore


@dataclass
class _Waiter:
    request: pb.LeaseRequest
    until_s: float
    reply: Promise[pb.LeaseReply]


class HeldCalls:
    """The calls that wait at one incarnation of the coordinator.

    Parameters
    ----------
    exclusive, core
        The coordinator's.
    told : callable
        Sees every answer as it leaves.
    """

    def __init__(
        self, world: World, exclusive: ExclusiveCore, core: Core, told: Callable[[pb.LeaseReply], None]
    ) -> None:
        self._world = world
        self._exclusive = exclusive
        self._core = core
        self._told = told
        self._waiters: list[_Waiter] = []

    def hold(self, request: pb.LeaseRequest) -> Promise[pb.LeaseReply]:
        """Hold a call that got nothing."""
        waiter = _Waiter(request, self._world.now_s + request.wait_s, Promise())
        self._waiters.append(waiter)
        return waiter.reply

    def answer(self) -> None:
        """Answer who can be granted something now, who waits no more, and whose time is up."""
        core = self._core
        for waiter in list(self._waiters):
            if waiter not in self._waiters:
                return  # the process died while it answered the one before
            asked = waiter.request
            reply = pb.LeaseReply(state=core.job.state.value, view=core.job.shards.view)  # type: ignore[arg-type]
            waits = core.job.workers.is_latest_call(asked.worker, asked.incarnation, asked.sequence)
            if waits:
                reply = lease_reply(self._exclusive.run_exclusive(partial(_grant, asked=asked)))
            nothing = not (reply.granted or reply.evaluations or core.job.over)
            if not waits or not nothing or self._world.now_s >= waiter.until_s:
                self._waiters.remove(waiter)
                self._told(reply)
                waiter.reply.settle(reply)

    def drop(self) -> None:
        """Drop all calls unanswered."""
        self._waiters.clear()


def _grant(core: Core, now_s: float, asked: pb.LeaseRequest) -> LeaseAnswer:
    return core.grant(core.job.workers.by_name[asked.worker], asked.want, now_s)
