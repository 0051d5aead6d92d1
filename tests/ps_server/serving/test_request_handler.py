"""RequestHandler: what requests of every transport have in common: their target, the lock and their time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import pytest

from parashard.errors import (
    NonFiniteGradient,
    NotReady,
    QueueFull,
    StaleIncarnation,
    StalePlan,
    TooEarly,
    WrongRun,
)
from parashard.plan.variables import Variable
from parashard.protocol.messages import PullRun, PushResult
from parashard_server.core.shard import Shard
from parashard_server.serving import request_handler
from parashard_server.serving.request_handler import RequestHandler
from parashard_server.shard_host import ShardHost
from support.in_process import plan_of, push_for, shard_of, variables_of
from support.waiting import eventually

PLAN = plan_of(variables_of(Variable("w", (4,))))


class Doubles:
    """A plane among fakes: a lock that takes time to come."""

    def __init__(self, **of_shard: Any) -> None:
        self.now_s = 100.0
        self.shard = shard_of(PLAN, **of_shard)
        self.alone = False
        self.turn_s = self.look_s = 0.0
        self.timeouts_s: list[float] = []
        self.looked = 0
        self.took_s: list[float] = []
        self.host = ShardHost(self.shard, self, "")  # type: ignore[arg-type]
        self.host.after_request = self.look
        self.plane = RequestHandler(self.host, self, clock=lambda: self.now_s)  # type: ignore[arg-type]

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:  # the lock's
        self.timeouts_s.append(timeout_s)
        self.now_s += self.turn_s
        self.alone = True
        try:
            yield
        finally:
            self.alone = False

    def look(self, shard: Shard, seconds: float) -> None:  # the checkpointer's
        assert self.alone
        assert shard is self.host.shard
        self.looked += 1
        self.took_s.append(seconds)
        self.now_s += self.look_s

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def push(self, step: int = 0, value: float = 1.0, timeout_s: float = 10.0) -> PushResult:
        return self.plane.push(push_for(self.shard, step, np.full(4, value)), timeout_s).result

    def pull(self, timeout_s: float = 10.0) -> bytes:
        run = PullRun(self.shard.identity, None, None, 0, 16)
        return self.plane.pull(run, timeout_s, lambda weights: b"".join(run.values for run in weights.runs))


def test_a_push_and_a_pull_take_their_turn() -> None:
    it = Doubles()
    assert it.push(value=2.0) is PushResult.APPLIED
    assert np.frombuffer(it.pull(timeout_s=3.0), "<f4").tolist() == [2.0] * 4
    assert (it.timeouts_s, it.looked) == ([10.0, 3.0], 2)


def test_only_what_moves_the_weights_counts_as_an_apply() -> None:
    it = Doubles()
    it.push(step=0)
    it.push(step=0)
    it.pull()
    assert sum(it.shard.record.applies) == 1


def test_in_sync_mode_the_request_that_begins_a_round_is_the_apply() -> None:
    it = Doubles(round_steps=1)
    it.push(step=0)
    assert sum(it.shard.record.applies) == 0
    it.plane.pull(PullRun(it.shard.identity, 1, 1, 0, 16), 1.0, lambda weights: None)
    assert sum(it.shard.record.applies) == 1


def test_weights_are_read_while_they_do_not_change() -> None:
    it = Doubles()
    assert it.plane.pull(PullRun(it.shard.identity, None, None, 0, 0), 1.0, lambda weights: it.alone)


def test_a_shard_that_stops_refuses_all_at_once() -> None:
    it = Doubles()
    it.plane.draining = True
    for request in (it.push, it.pull, lambda: it.plane.check(it.shard.identity)):
        with pytest.raises(NotReady, match="shard 0 is stopping"):
            request()
    assert (it.timeouts_s, it.shard.updates.version) == ([], 0)


@pytest.mark.parametrize(
    ("changed", "error"),
    [({"run_id": "run-2"}, WrongRun), ({"plan_version": 6}, StalePlan), ({"incarnation": 2}, StaleIncarnation)],
)
def test_a_greeting_of_another_incarnation_is_refused(
    changed: dict[str, object], error: type[Exception]
) -> None:  # P2, P3
    it = Doubles()
    it.plane.check(it.shard.identity)
    with pytest.raises(error):
        it.plane.check(it.shard.identity._replace(**changed))  # type: ignore[arg-type]


def test_the_longest_push_is_the_whole_vector_as_float32_of_the_incarnation_that_is_served() -> None:
    it = Doubles()
    assert it.plane.push_bytes_max == 16
    it.host.shard = shard_of(plan_of(variables_of(Variable("w", (9,)))), incarnation=2)
    assert it.plane.push_bytes_max == 36


def test_time_in_the_shard_is_counted_whatever_comes_of_it() -> None:
    it = Doubles()
    it.turn_s, it.look_s = 100.0, 0.25  # the line does not count
    it.push()
    it.pull()
    it.pull()
    assert (it.shard.record.push_s, it.shard.record.pull_s) == (0.25, 0.5)
    with pytest.raises(NonFiniteGradient):
        it.push(1, np.nan)
    assert (it.looked, it.shard.record.refused_pushes) == (3, 1)


def test_what_follows_a_request_is_told_how_long_that_took() -> None:
    it = Doubles()
    it.turn_s, it.look_s = 100.0, 3.0  # neither the line nor what follows is the request's
    it.push()
    it.plane.pull(PullRun(it.shard.identity, None, None, 0, 16), 10.0, lambda weights: it.pass_time(0.5))
    assert it.took_s == [0.0, 0.5]


def test_a_line_that_is_too_long_reaches_the_caller() -> None:
    it = Doubles()

    def full(timeout_s: float) -> NoReturn:
        raise QueueFull("64 requests are waiting")

    it.held = full  # type: ignore[method-assign, assignment]
    for request in (it.push, it.pull):
        with pytest.raises(QueueFull):
            request()


def version_of(it: Doubles, least: int) -> tuple[int, float]:
    run = PullRun(it.shard.identity, None, None, 0, 16, least_version=least)
    return it.plane.pull(run, 10.0, lambda weights: (weights.version, weights.waited_s))


def test_a_pull_waits_for_the_version_that_it_needs() -> None:
    it = Doubles()
    it.plane._version_wait_s = 30.0
    with ThreadPoolExecutor(1) as other:
        pulled = other.submit(version_of, it, 2)
        eventually(lambda: it.plane._waiting == 1, "the pull waits")
        it.now_s += 3.0
        it.push(0)
        assert not pulled.done()
        it.push(1)
        assert pulled.result(30.0) == (2, 3.0)
    assert version_of(it, 2) == (2, 0.0), "it is there"


def test_a_pull_that_waited_in_vain_is_too_early() -> None:
    it = Doubles()
    it.plane._version_wait_s = 0.001
    with pytest.raises(TooEarly, match="weights of 2 updates; this shard has 0"):
        version_of(it, 2)


def test_only_so_many_pulls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_handler, "WAITING_MAX", 0)
    with pytest.raises(QueueFull, match="0 pulls wait for a version"):  # a client asks again after a pause
        version_of(Doubles(), 1)
