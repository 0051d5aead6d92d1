"""Network: calls between processes, over links that lose, delay, duplicate and reorder messages.

Knows nothing of what a message says. What is under way stays under way when its sender dies: that is a zombie's push.
A duplicate of a request comes after the request, and its answer goes nowhere, as with any RPC whose call is over. A
connection lasts until it fails: its client goes on talking to a process that was replaced.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sim_world import Process, Promise, World

from parashard.errors import ParashardError, Unreachable

LATENCY_S = (0.001, 0.008)
LATE_S = (0.2, 5.0)  # from sooner than a call's deadline to some lease times


class Network:
    """Links between all processes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.hosts: dict[str, Process] = {}  # who listens at an address
        self.under_way = 0  # requests that have not arrived yet
        self._sent: Counter[tuple[str, str]] = Counter()
        self._newest: Counter[tuple[str, str]] = Counter()

    def call(self, sender: Process, address: str, request: Any, deadline_s: float) -> Promise[Any]:
        """Send a request; return the promise of its answer, an error of the receiver, or Unreachable."""
        answer: Promise[Any] = Promise()
        receiver = sender.connections.get(address) or self.hosts.get(address)
        if receiver is None or not receiver.alive:
            sender.connections.pop(address, None)
            refused = Unreachable("connection refused", peer=address)
            self._world.after(self._delay_s(), lambda: answer.settle(error=refused))
            return answer
        sender.connections[address] = receiver
        link = (sender.name, receiver.name)
        self._sent[link] += 1
        number = self._sent[link]
        self._world.after(deadline_s, lambda: self._expire(sender, address, answer, deadline_s))
        delay_s = self._delay_s()
        if not self._world.strikes("lost"):
            self.under_way += 1
            self._world.after(delay_s, lambda: self._arrive(sender, receiver, number, request, answer))
        if self._world.strikes("duplicated"):
            ignored: Promise[Any] = Promise()
            delay_s += self._delay_s()
            self.under_way += 1
            self._world.after(delay_s, lambda: self._arrive(sender, receiver, number, request, ignored))
        return answer

    def _expire(self, sender: Process, address: str, answer: Promise[Any], deadline_s: float) -> None:
        if not answer.settled:
            sender.connections.pop(address, None)
            answer.settle(error=Unreachable(f"no answer within {deadline_s} s", peer=address))

    def _arrive(self, sender: Process, receiver: Process, number: int, request: Any, answer: Promise[Any]) -> None:
        receiver.suffer()
        if receiver.hung:
            self.under_way -= 1
            return
        if receiver.paused:
            wait_s = receiver.paused_until_s - self._world.now_s
            self._world.after(wait_s, lambda: self._arrive(sender, receiver, number, request, answer))
            return
        self.under_way -= 1
        link, fired = (sender.name, receiver.name), self._world.fired
        fired["reordered"] += number < self._newest[link]
        fired["message from the dead"] += not sender.alive
        fired["message after its deadline"] += answer.settled
        self._newest[link] = max(self._newest[link], number)
        self._world.note(f"{sender.name} > {receiver.name} #{number}")
        if not receiver.alive:
            return
        result: Promise[Any] = Promise()
        try:
            value = receiver.receive(request)
        except ParashardError as error:
            self._world.note(error.code)
            result.settle(error=type(error)(error.message, peer=receiver.name))
        else:
            if isinstance(value, Promise):
                result = value
            else:
                result.settle(value)
        result.then(lambda: self._reply(receiver, result, answer))

    def _reply(self, receiver: Process, result: Promise[Any], answer: Promise[Any]) -> None:
        receiver.suffer()
        if not receiver.alive or receiver.hung or self._world.strikes("lost"):
            return

        def settle() -> None:
            try:
                answer.settle(result.result())
            except ParashardError as error:
                answer.settle(error=error)

        self._world.after(self._delay_s(), settle)

    def _delay_s(self) -> float:
        return self._world.rng.uniform(*(LATE_S if self._world.strikes("late") else LATENCY_S))
