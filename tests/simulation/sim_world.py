"""World: virtual time, one source of randomness, and processes whose every wait is an event.

Owns the event queue, the faults' dice, the count of faults that fired and the trace. Knows nothing of shards, workers
or messages. A process is a set of coroutines that wait for promises; between any two waits it may crash or be paused,
so "at any event" means just that. The same seed gives the same events in the same order.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from parashard.errors import ParashardError

_Value = TypeVar("_Value")
Task = Coroutine["Promise[Any]", None, None]


@dataclass(frozen=True)
class Faults:
    """How often each fault strikes, as probabilities, and when all of them stop."""

    lost: float = 0.0  # per message
    late: float = 0.0  # per message: it comes when its caller may have given up, or be dead
    duplicated: float = 0.0  # per request
    crash: float = 0.0  # per event of a worker
    pause: float = 0.0  # per event of a worker: it stands still, its leases may end, and it comes back
    leave: float = 0.0  # per event of a worker: it is asked to stop, and gives its leases back
    shard_crash: float = 0.0  # per event of a shard
    shard_pause: float = 0.0
    shard_stop: float = 0.0  # per look of a shard at its checkpoints: it is asked to stop, and saves
    coordinator_crash: float = 0.0  # per event of a coordinator
    coordinator_pause: float = 0.0
    hang: float = 0.0  # per event of a worker: it stands still until it is killed
    shard_hang: float = 0.0
    coordinator_hang: float = 0.0
    replaced: float = 0.0  # per look at a paused process: another one is started in its place
    poison: float = 0.0  # per gradient: a value turns to NaN after the worker's own check (P6)
    rows_damaged: float = 0.0  # per crash of a shard: the file that its newest checkpoints with rows share is changed
    store_fails: float = 0.0  # per call of the store: it has no effect
    store_slow: float = 0.0  # per call of the store: its caller stands still meanwhile
    store_reply_lost: float = 0.0  # per change of the store: it has its effect, and its caller gets an error
    stray_claim: float = 0.0  # per look of a visitor: a process claims an incarnation, and dies
    until_s: float = 0.0


CALM = Faults()


class Stuck(Exception):
    """The job did not finish within the bound of events after the faults had stopped."""


class Promise(Generic[_Value]):
    """A value that comes later, or an error. Settled once; what comes after is ignored."""

    def __init__(self) -> None:
        self.settled = False
        self._value: _Value | None = None
        self._error: ParashardError | None = None
        self._then: list[Callable[[], None]] = []

    def settle(self, value: _Value | None = None, error: ParashardError | None = None) -> None:
        """Settle with a value or an error, unless it is settled."""
        if self.settled:
            return
        self.settled, self._value, self._error = True, value, error
        for call in self._then:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """Call when settled."""
        if self.settled:
            call()
        else:
            self._then.append(call)

    def result(self) -> _Value:
        """Return the value of a settled promise, or raise its error."""
        assert self.settled
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def __await__(self) -> Generator[Promise[Any], None, _Value]:
        if not self.settled:
            yield self
        return self.result()


class World:
    """Events in the order of virtual time.

    Parameters
    ----------
    seed : int
        Draws everything that is left to chance.
    faults : Faults
        What goes wrong.
    """

    def __init__(self, seed: int, faults: Faults) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.now_s = 0.0
        self.events = 0
        self.calm_events = 0
        self.fired: Counter[str] = Counter()
        self.violations: list[str] = []
        self.acting: Process | None = None  # whose event this is
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._trace = hashlib.blake2b(digest_size=16)

    @property
    def calm(self) -> bool:
        """Faults have stopped."""
        return self.now_s >= self.faults.until_s

    @property
    def trace(self) -> str:
        """Digest of everything that has been noted, with its time."""
        return self._trace.hexdigest()

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self._trace.update(f"{self.now_s!r} {text}\n".encode())

    def violated(self, text: str) -> None:
        """Note that a rule was broken, seen as it happened."""
        if text not in self.violations:
            self.note(text)
            self.violations.append(text)

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call later."""
        self._scheduled += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._scheduled, call))

    def sleep(self, delay_s: float) -> Promise[None]:
        """Return a promise that is settled later."""
        promise: Promise[None] = Promise()
        self.after(delay_s, promise.settle)
        return promise

    def strikes(self, fault: str) -> bool:
        """Throw the dice for a fault, and count it when it strikes."""
        rate: float = getattr(self.faults, fault)
        if self.calm or not rate or self.rng.random() >= rate:
            return False
        self.fired[fault] += 1
        self.note(fault)
        return True

    def run(self, over: Callable[[], bool], calm_events_max: int) -> None:
        """Work until `over`; raise Stuck after so many events without faults, or when nothing is left to happen."""
        while not over() and not self.violations:
            if self.calm_events >= calm_events_max or not self._queue:
                raise Stuck(f"not over {self.calm_events} events after the last fault, at {self.now_s:.1f} s")
            self._next()
            self.calm_events += self.calm

    def work_on(self, over: Callable[[], bool]) -> None:
        """Work until `over`, or until nothing is left to happen."""
        while self._queue and not over():
            self._next()

    def _next(self) -> None:
        self.now_s, _, call = heapq.heappop(self._queue)
        self.events += 1
        call()


class Process:
    """A simulated process that waits and may be killed; subclasses say what it does.

    Faults strike at any of its events, which are its own steps and the messages that it gets and answers. A process
    that died answers nothing any more; one that was paused finds what came meanwhile; one that hangs never goes on, and
    what is sent to it is lost. A supervisor may put a new one in its place.
    """

    crash = ""  # which of the faults ends it
    pause = ""
    hang = ""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.connections: dict[str, Process] = {}  # by address, as long as they are good
        self.paused_until_s = 0.0
        self.hung_since_s: float | None = None
        self._hung_tasks: list[Task | None] = []

    @property
    def hung(self) -> bool:
        """It stands still until it is killed."""
        return self.alive and self.hung_since_s is not None

    @property
    def paused(self) -> bool:
        """It stands still for now, or for good."""
        return self.hung or (self.alive and self.paused_until_s > self.world.now_s)

    def receive(self, request: Any) -> Any:
        """Answer a request: a value, or a promise of one; a ParashardError is an answer too."""
        raise NotImplementedError(f"{self.name} is no server")

    def spawn(self, work: Callable[..., Task], *args: object) -> None:
        """Begin to work, at the next event."""
        self.world.after(0.0, lambda: self._step(None, lambda: work(*args)))

    def moment(self) -> Promise[None]:
        """Let time pass between two actions, so that the process may die between them."""
        return self.world.sleep(self.world.rng.uniform(0.0, 0.001))

    def end(self, why: str) -> None:
        """End at once, whatever is under way."""
        if self.alive:
            self.alive = False
            self.world.note(f"{self.name} ends: {why}")
            self.ended(why)

    def ended(self, why: str) -> None:
        """Be told of the end."""

    def crashing(self) -> None:
        """Be told of a crash, before it."""

    def pausing(self, pause_s: float) -> None:
        """Be told of a pause, before it."""

    def _step(self, task: Task | None, begin: Callable[[], Task] | None = None) -> None:
        self.suffer()
        if not self.alive:
            if task is not None:
                task.close()
            return
        if self.hung:
            self._hung_tasks.append(task)  # a coroutine that is dropped would be closed, and so go on
            return
        if self.paused:
            self.world.after(self.paused_until_s - self.world.now_s, lambda: self._step(task, begin))
            return
        if task is None:
            assert begin is not None
            task = begin()
        try:
            promise = task.send(None)
        except StopIteration:
            return
        except ParashardError as error:  # nothing that a process can go on after
            self.end(f"{type(error).__name__}: {error}")
            return
        promise.then(lambda: self.world.after(0.0, lambda: self._step(task)))

    def suffer(self) -> None:
        """Let the faults of its role strike, or not."""
        if not self.alive:
            return
        self.world.acting = self
        if self.crash and self.world.strikes(self.crash):
            self.crashing()
            self.end("crash")
        elif self.pause and not self.paused and self.world.strikes(self.pause):
            pause_s = self.world.rng.uniform(0.2, 3.0)
            self.paused_until_s = self.world.now_s + pause_s
            self.pausing(pause_s)
        elif self.hang and not self.paused and self.world.strikes(self.hang):
            self.hung_since_s = self.world.now_s


class Stillborn(Process):
    """A process that ended before it did anything: the store gave an error at its start."""

    def __init__(self, world: World, name: str, why: str) -> None:
        super().__init__(world, name)
        world.fired["could not start"] += 1
        self.end(why)
