"""The coordinator's process around the real core, and the supervisor that starts workers.

The process does what `coordinator.service` and `coordinator.__main__` do: one call at a time, a bounded wait for
workers that got nothing, ticks, and the final weights. Knows no fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sim_client import SimulatedClient, View
from sim_shard import RUN_ID, RegisterShard
from sim_world import Process, Promise, World

from coordinator.core import Core, LeaseAnswer, LeaseCall
from coordinator.launchers import Exit, ProcessName
from coordinator.service import lease_call, lease_reply
from parashard.errors import RetryLater
from parashard.variables import Float32s
from protos import coordinator_pb2 as pb
from worker.leased import Joined

TICK_S = 0.05
SUPERVISE_S = 0.2


@dataclass(frozen=True)
class RegisterWorker:
    """A worker joins."""

    name: str


@dataclass(frozen=True)
class GetView:
    """Asks for the shards' lives."""


@dataclass
class _Waiter:
    call: LeaseCall
    revoked: tuple[int, ...]
    until_s: float
    reply: Promise[pb.LeaseReply]


class CoordinatorProcess(Process):
    """Serves one job, until the final weights are in."""

    def __init__(self, world: World, core: Core) -> None:
        super().__init__(world, "coordinator")
        self.core = core
        self.client: SimulatedClient
        self.final: dict[str, Float32s] | None = None
        self._waiters: list[_Waiter] = []

    def start(self) -> None:
        """Begin to tick."""
        self.spawn(self._tick)

    def receive(self, request: RegisterShard | RegisterWorker | GetView | pb.LeaseRequest) -> Any:
        """Answer a call."""
        core, now_s = self.core, self.world.now_s
        match request:
            case RegisterShard():
                core.register_shard(request.shard, request.life, request.applied.copy())
                answer: Any = None
            case RegisterWorker():
                worker = core.register_worker(request.name, "same arithmetic", "cpu", "", now_s)
                answer = Joined(RUN_ID, worker.name, worker.incarnation, core.options.lease_ttl_s)
            case GetView():
                return self._view()
            case pb.LeaseRequest():
                answer = self._lease(request)
        self.wake()
        return answer

    def _lease(self, request: pb.LeaseRequest) -> pb.LeaseReply | Promise[pb.LeaseReply]:
        call = lease_call(request)
        answer = self.core.lease(call, self.world.now_s)
        if not (request.want and request.wait_s > 0 and self._nothing(answer)):
            return lease_reply(answer)
        reply: Promise[pb.LeaseReply] = Promise()
        self._waiters.append(_Waiter(call, tuple(answer.revoked), self.world.now_s + request.wait_s, reply))
        self.world.after(request.wait_s, self.wake)
        return reply

    def wake(self) -> None:
        """Look again at who waits: something has changed, or the time is up."""
        for waiter in list(self._waiters):
            call = waiter.call
            worker = self.core.workers.by_name.get(call.worker)
            fenced = worker is None or worker.incarnation != call.incarnation
            answer = LeaseAnswer([], [], waiter.revoked, self.core.state, self.core.shards.view, "")
            if worker is not None and not fenced:
                answer = self.core.grant(worker, call.want, self.world.now_s, waiter.revoked)
            if fenced or not self._nothing(answer) or self.world.now_s >= waiter.until_s:
                self._waiters.remove(waiter)
                waiter.reply.settle(lease_reply(answer))

    def _nothing(self, answer: LeaseAnswer) -> bool:
        return not (answer.granted or answer.evaluations or answer.revoked or self.core.over)

    def _view(self) -> View:
        return View(self.core.shards.view, tuple(life.incarnation for life in self.core.shards.lives()))

    async def _tick(self) -> None:
        core = self.core
        while not core.over:
            core.tick(self.world.now_s)
            for event in core.new_events:
                self.world.note(event)
                self.world.fired["silent worker"] += " was silent " in event
            core.new_events.clear()
            if core.complete:
                await self._finish()
            self.wake()
            await self.world.sleep(TICK_S)

    async def _finish(self) -> None:
        """Pull the final weights; in rounds that commits the last one (P10)."""
        core = self.core
        self.client.view = self._view()
        try:
            pulled = await self.client.pull(round_=core.policy.round_of(core.leases.target))
        except RetryLater:
            return  # the budget of the real one is longer; the next tick tries again
        self.final = pulled.variables
        core.done()


class Supervisor:
    """Starts workers, and starts them again when they end.

    Parameters
    ----------
    start : callable
        From a name ("" leaves it to the coordinator) to a new worker that has begun to work.
    tells : bool
        True: as `parashard run`, which asks the coordinator what to start and tells it of exits. False: as an engine
        that nobody hears of, so that leases end by time; some replacements come under another name.
    """

    def __init__(
        self, world: World, coordinator: CoordinatorProcess, start: Callable[[str], Process], workers: int, tells: bool
    ) -> None:
        self._world = world
        self._coordinator = coordinator
        self._start = start
        self._tells = tells
        self._running: dict[int, Process] = {}
        self._exits: list[Exit] = []
        for index in range(0 if tells else workers):
            self._running[index] = start(f"worker-{index}")
        self._look()

    def _look(self) -> None:
        core, now_s = self._coordinator.core, self._world.now_s
        for index, process in list(self._running.items()):
            if not process.alive:
                del self._running[index]
                self._exits.append(Exit(ProcessName("worker", index), 1, "ended"))
                if not self._tells and not core.over:
                    self._world.after(self._world.rng.uniform(0.1, 2.0), partial(self._replace, index))
            elif process.paused and not self._tells and self._world.strikes("replaced"):
                self._running[index] = self._start(f"worker-{index}")  # the old one will come back, and must stop
        if self._tells:
            orders = core.supervise(self._exits, [ProcessName("worker", i) for i in self._running], now_s)
            for name in orders.start:
                self._running[name.index] = self._start(str(name))
            self._coordinator.wake()
        self._exits.clear()
        if not core.over:
            self._world.after(SUPERVISE_S, self._look)

    def _replace(self, index: int) -> None:
        elsewhere = self._world.rng.random() < 0.3
        self._running[index] = self._start("" if elsewhere else f"worker-{index}")
