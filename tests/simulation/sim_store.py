"""What outlives a process: a run's store in memory, with the world's faults."""

from __future__ import annotations

from collections.abc import Callable

from sim_world import World

from parashard.errors import AlreadyStored, StoreFailed
from support.store_fakes import MemoryStore

SLOW_S = (0.05, 1.0)


class SimulatedStore(MemoryStore):
    """A store whose calls fail, take long, or have their effect and lose their reply, as the world's faults say.

    `sound` is the same store without faults.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.sound = MemoryStore(contents=self.contents)
        self._world = world

    def create(self, name: str, content: bytes | memoryview) -> None:
        super().create(name, content)
        if self._world.strikes("store_reply_lost"):
            self._world.fired["a claim's reply lost"] += name.startswith("claims/")
            if self._world.rng.random() < 0.5:  # a client library asked again by itself, and met its own object
                raise AlreadyStored(f"{self.url}/{name}: is there already")
            raise StoreFailed(f"{self.url}/{name}: the reply was lost")

    def replace(self, name: str, content: bytes | memoryview) -> None:
        super().replace(name, content)
        self._lose_reply(name)

    def delete(self, name: str) -> None:
        super().delete(name)
        self._lose_reply(name)

    def _lose_reply(self, name: str) -> None:
        if self._world.strikes("store_reply_lost"):
            raise StoreFailed(f"{self.url}/{name}: the reply was lost")

    def _called(self, operation: str, name: str, carry_out: Callable[[], object] = lambda: None) -> None:
        world = self._world
        if world.acting is not None and world.strikes("store_slow"):
            slow_until_s = world.now_s + world.rng.uniform(*SLOW_S)
            world.acting.paused_until_s = max(world.acting.paused_until_s, slow_until_s)
        if world.strikes("store_fails"):
            raise StoreFailed(f"{self.url}/{name}: {operation} failed")
