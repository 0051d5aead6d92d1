"""Supervisor: starts the processes of a job, and starts them again when they end.

Either as `parashard run`, which asks the coordinator what to start, tells it of exits and starts it again; or as an
external engine, which reports nothing, so that leases end by time, replacements come under other names, and a process
that only stands still may be replaced too: then there are two of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sim_coordinator import Ending
from sim_parts import RUN_ID
from sim_world import Process, World

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import Superseded
from parashard_coordinator.core.supervision import ProcessName

LOOK_S = 0.2
RESTART_S = (0.05, 1.0)
SILENCE_S = 2.0
LIVENESS_S = 3.0  # after which an engine's probe gives up on a process that hangs


@dataclass(frozen=True)
class Starts:
    """How processes are started; each has begun to work when it is returned."""

    coordinator: Callable[[], Process]
    shard: Callable[[int], Process]
    worker: Callable[[str], Process]  # "" leaves its name to the coordinator


class Supervisor:
    """Supervises one job.

    Parameters
    ----------
    starts : Starts
        How processes are started.
    shards, workers : int
        How many.
    tells : bool
        True: as `parashard run`. False: as an engine.
    ending : Ending
        Tells that the job is over: then nothing is started any more.
    """

    def __init__(self, world: World, starts: Starts, shards: int, workers: int, *, tells: bool, ending: Ending) -> None:
        self._world = world
        self._starts = starts
        self._tells = tells
        self._ending = ending
        self._running: dict[ProcessName, Process] = {}
        self._exits: list[pb.ProcessExit] = []
        self._exit_number = 0
        self._silent_since_s: float | None = None
        self.coordinator = starts.coordinator()
        if not tells:
            for index in range(shards):
                self._start(ProcessName("shard", index))
            for index in range(workers):
                self._start(ProcessName("worker", index))
        self._look()

    def _start(self, name: ProcessName, *, elsewhere: bool = False) -> None:
        if self._ending.by is not None:
            return
        if name.role == "shard":
            process = self._starts.shard(name.index)
        else:
            process = self._starts.worker("" if elsewhere else str(name))
        self._running[name] = process

    def _look(self) -> None:
        if self._ending.by is not None:
            return
        self._look_at_coordinator()
        for name, process in list(self._running.items()):
            if not process.alive:
                del self._running[name]
                self._ended(name)
            elif not self._tells and process.hung:
                self._probe(process)
            elif process.paused and not self._tells and self._world.strikes("replaced"):
                self._world.fired[f"two of one {name.role}"] += 1
                self._start(name)  # the old one will come back, and must stop
        if self._tells and self.coordinator.alive and not self.coordinator.paused:
            self._ask()
        self._world.after(LOOK_S, self._look)

    def _look_at_coordinator(self) -> None:
        world, coordinator = self._world, self.coordinator
        if coordinator.alive and not coordinator.paused:
            self._silent_since_s = None
            return
        if self._silent_since_s is None:
            self._silent_since_s = world.now_s
        away_s = world.now_s - self._silent_since_s
        if coordinator.alive and self._tells and away_s > SILENCE_S:
            coordinator.end("silent")
        if coordinator.hung and not self._tells:
            self._probe(coordinator)
        replaced = coordinator.paused and not self._tells and world.strikes("replaced")
        if replaced or (not coordinator.alive and away_s > world.rng.uniform(*RESTART_S)):
            world.fired["two of one coordinator"] += replaced
            world.fired["coordinator started again"] += 1
            self._silent_since_s = None
            self.coordinator = self._starts.coordinator()

    def _probe(self, process: Process) -> None:
        """End a process that hangs, as an engine does whose probes it does not answer."""
        assert process.hung_since_s is not None
        if self._world.now_s - process.hung_since_s > LIVENESS_S:
            process.end("its engine's probes found it dead")

    def _ended(self, name: ProcessName) -> None:
        self._exit_number += 1
        if self._tells:
            process = pb.ProcessName(role=name.role, index=name.index)
            self._exits.append(pb.ProcessExit(process=process, exit_code=1, reason="ended", number=self._exit_number))
            return
        elsewhere = name.role == "worker" and self._world.rng.random() < 0.3
        self._world.after(self._world.rng.uniform(*RESTART_S), partial(self._start, name, elsewhere=elsewhere))

    def _ask(self) -> None:
        """Tell the coordinator of exits, and do what it asks."""
        running = [pb.ProcessName(role=name.role, index=name.index) for name in self._running]
        request = pb.SuperviseRequest(run_id=RUN_ID, exits=self._exits, running=running)
        try:
            orders: pb.SuperviseReply = self.coordinator.receive(request)
        except Superseded:
            return
        self._exits.clear()
        for order in orders.kill:
            self._world.fired["killed for its silence"] += 1
            self._running[ProcessName(order.role, order.index)].end("killed")
        for order in orders.start:
            self._start(ProcessName(order.role, order.index))
