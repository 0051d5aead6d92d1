"""RequestHandler: pushes and pulls on the shard that is served now, whatever carried them here.

Calls the core under the shard's lock, looks after the log and the checkpointer, and counts time. Knows no wire. Called
by the gRPC service and the stream services, from many threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from parashard.errors import NotReady, StaleIncarnation
from parashard.process import failpoints
from parashard.protocol.messages import PullRun, Push, PushResult, Receipt, Target, Weights
from parashard_server.core.shard import Shard
from parashard_server.core.update_policies import FoldedStep
from parashard_server.durability.checkpointer import Checkpointer
from parashard_server.durability.lifecycle import ShardLifecycle
from parashard_server.serving.served import Served

_Result = TypeVar("_Result")


class RequestHandler:
    """Takes pushes and gives weights.

    Parameters
    ----------
    served : Served
        The pure core and its lock.
    checkpointer : Checkpointer
        Looks after each request whether the state is to be saved.
    lives : ShardLifecycle
        Knows the log.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        served: Served,
        checkpointer: Checkpointer,
        lives: ShardLifecycle,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._served = served
        self._checkpointer = checkpointer
        self._lives = lives
        self._clock = clock
        self.draining = False

    @property
    def push_bytes_max(self) -> int:
        """Length of the longest push that can be right: every partition as float32."""
        return self._served.shard.storage.weights.nbytes

    def check(self, target: Target) -> None:
        """Refuse what is not meant for the shard as it is now.

        Raises
        ------
        NotReady
            If the shard is stopping.
        WrongRun, StalePlan, StaleIncarnation
            If another run, plan or life is meant (P2, P3).
        """
        self._check_open()
        self._served.shard.check_target(target)

    def push(self, push: Push, timeout_s: float) -> Receipt:
        """Take a push; return once the log has it, where there is one. The payload is borrowed until then.

        Raises
        ------
        ParashardError
            As `Shard.push`; `NotReady` while the shard is stopping, `QueueFull` where its turn did not come,
            `StaleIncarnation` where the round had to begin again (P24).
        """
        self._check_open()
        deadline_s = self._clock() + timeout_s

        def take() -> tuple[Receipt, int]:
            started_s = self._clock()
            shard = self._served.shard
            uncopied, version = shard.storage.uncopied, shard.updates.version
            try:
                receipt = shard.push(push)
                self._time_apply(shard, version, started_s)
                if shard.storage.uncopied < uncopied:
                    self._checkpointer.stalled(self._clock() - started_s)
                self._checkpointer.look(shard)
                return receipt, self._lives.log_position
            finally:
                shard.record.push_s += self._clock() - started_s

        failpoints.hit("shard.push.received")
        try:
            receipt, position = self._served.lock.run(take, timeout_s)
        except FoldedStep as folded:
            self._lives.begin_round_again(push.target.incarnation, push.step)
            raise StaleIncarnation(f"{folded}; it begins again without it, in another life") from None
        self._lives.wait_durable(position, max(0.0, deadline_s - self._clock()))
        if receipt.result in (PushResult.APPLIED, PushResult.BUFFERED):
            failpoints.hit("shard.push.applied")
        return receipt

    def pull(self, run: PullRun, timeout_s: float, read: Callable[[Weights], _Result]) -> _Result:
        """Return what `read` makes of the weights; called while nobody moves them, and its views die with the call.

        Raises
        ------
        ParashardError
            As `Shard.pull`; `NotReady` while the shard is stopping, `QueueFull` where its turn did not come.
        """
        self._check_open()

        def take() -> _Result:
            started_s = self._clock()
            shard = self._served.shard
            version = shard.updates.version
            try:
                weights = shard.pull(run)
                self._time_apply(shard, version, started_s)
                result = read(weights)
                self._checkpointer.look(shard)
                return result
            finally:
                shard.record.pull_s += self._clock() - started_s

        result = self._served.lock.run(take, timeout_s)
        failpoints.hit("shard.pull.read")
        return result

    def _time_apply(self, shard: Shard, version: int, started_s: float) -> None:
        """Count how long a request took that moved the weights: a push, in sync mode whichever began the next round."""
        if shard.updates.version != version:
            shard.record.applied_in(self._clock() - started_s)

    def _check_open(self) -> None:
        if self.draining:
            raise NotReady(f"shard {self._served.shard.identity.shard} is stopping")
