"""Conformance, continued: how every transport fails, and how the waiting ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from parashard.errors import (
    MalformedFrame,
    NonFiniteGradient,
    ParashardError,
    PeerFailed,
    QueueFull,
    StaleIncarnation,
    StaleRound,
    Unreachable,
)
from parashard.protocol.messages import Buffers, PullRun, Push, VectorRun, Weights
from support.conformance_cases import DEADLINE_S, METHODS, Talk, pull_of, push_of
from support.fake_plane import GREETING, TARGET

# --- errors ---


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [NonFiniteGradient, StaleRound, QueueFull], ids=lambda error: error.code)
def test_the_peers_error_is_raised_as_itself_with_its_address(talk, method, error):
    def refuse(request: Push | PullRun) -> None:
        raise error("because of ümläuts")

    talk.plane.before = refuse
    with pytest.raises(ParashardError) as caught:
        talk.begin(method).result()
    assert type(caught.value) is error
    assert (caught.value.message, caught.value.peer) == ("because of ümläuts", talk.peer.address)
    assert talk.still_talks()


@pytest.mark.parametrize("method", METHODS)
def test_a_bug_of_the_peer_is_its_failure(talk, method):
    def break_down(request: Push | PullRun) -> None:
        raise ZeroDivisionError

    talk.plane.before = break_down
    with pytest.raises(PeerFailed, match="ZeroDivisionError") as caught:
        talk.begin(method).result()
    assert caught.value.peer == talk.peer.address
    talk.plane.before = lambda request: None
    with suppress(Unreachable):  # the peer may have given up the connection; that is found out once
        talk.begin(method).result()
    assert talk.still_talks()


@pytest.mark.parametrize("method", METHODS)
def test_another_incarnation_refuses_requests_to_the_one_before(talk, method):  # P3
    earlier = TARGET._replace(incarnation=TARGET.incarnation - 1)
    transport = talk.peer.connect(talk.peer.where, GREETING._replace(target=earlier))
    into = Buffers([bytearray(4)])
    try:
        pending = (
            transport.push(push_of(np.ones(4))._replace(target=earlier), DEADLINE_S)
            if method == "push"
            else transport.pull(pull_of(0, 4)._replace(target=earlier), into, DEADLINE_S)
        )
        with pytest.raises(StaleIncarnation):
            pending.result()
    finally:
        transport.close()
    assert talk.plane.pushes == []


SHORT: dict[str, Callable[[Weights], Weights]] = {
    "nothing": lambda weights: Weights(1, ()),
    "less at the end": lambda weights: Weights(1, (VectorRun(0, weights.runs[0].values[:-4]),)),
    "less at the start": lambda weights: Weights(1, (VectorRun(4, weights.runs[0].values[4:]),)),
}
MISPLACED: dict[str, Callable[[Weights], Weights]] = {
    "beyond the end": lambda weights: Weights(1, (VectorRun(8, weights.runs[0].values),)),
    "far away": lambda weights: Weights(1, (VectorRun(1 << 60, weights.runs[0].values),)),
    "backwards": lambda weights: Weights(
        1, (VectorRun(2000, weights.runs[0].values[2000:]), VectorRun(0, weights.runs[0].values[:2000]))
    ),
    "twice": lambda weights: Weights(1, (VectorRun(0, weights.runs[0].values[:2000]),) * 2),
}


LIES = [(kind, lie) for kind in ("grpc", "grpc-tls", "tcp", "tcp-tls") for lie in SHORT | MISPLACED]


@pytest.mark.parametrize(("kind", "lie"), LIES, indirect=["kind"])
def test_an_answer_that_is_not_what_was_asked_for_is_malformed(talk, lie):
    talk.plane.answered = (SHORT | MISPLACED)[lie]
    guard = np.full(4000 + 64, 7, np.uint8)
    with pytest.raises(MalformedFrame, match="asked for"):
        talk.transport.pull(pull_of(0, 4000), Buffers([guard[32:-32]]), DEADLINE_S).result()
    assert (guard[:32] == 7).all()
    assert (guard[-32:] == 7).all()
    talk.plane.answered = lambda weights: weights
    assert talk.still_talks()


# --- the end of waiting ---


@pytest.mark.parametrize("method", METHODS)
def test_the_deadline_ends_a_request(talk, method):
    talk.hold_up(step=7)
    pending = talk.begin(method, step=7, deadline_s=0.05)
    with pytest.raises(Unreachable) as caught:
        pending.result()
    assert caught.value.peer == talk.peer.address
    talk.hold.set()
    assert talk.still_talks()


@pytest.mark.parametrize("method", METHODS)
def test_a_request_that_was_cancelled_has_no_result(talk, method):
    talk.hold_up(step=7)
    pending = talk.begin(method, step=7)
    pending.cancel()
    pending.cancel()
    with pytest.raises(Unreachable):
        pending.result()
    talk.hold.set()
    assert talk.still_talks()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ending", ["cancel", "close"])
def test_another_thread_can_end_the_waiting(talk, method, ending):
    talk.hold_up(step=7)
    pending = talk.begin(method, step=7)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(pending.result)
        assert talk.held.wait(DEADLINE_S)
        pending.cancel() if ending == "cancel" else talk.transport.close()
        assert isinstance(waiting.exception(DEADLINE_S), Unreachable)
    talk.hold.set()


@pytest.mark.parametrize("method", METHODS)
def test_after_closing_nothing_is_reached_and_closing_again_does_nothing(talk, method):
    talk.transport.close()
    with pytest.raises(Unreachable):
        talk.begin(method).result()
    talk.transport.close()


@pytest.mark.parametrize("method", METHODS)
def test_an_address_without_a_listener_is_unreachable(talk, method):
    talk.peer.stop()
    with pytest.raises(Unreachable) as caught:
        talk.begin(method, deadline_s=0.5).result()
    assert caught.value.peer == talk.peer.address


def test_a_peer_killed_in_the_middle_is_unreachable(dying):
    transport, process = dying
    talk, into = Talk(None, transport), np.empty(1024, np.float32)  # type: ignore[arg-type]
    under_way = [talk.begin(method, into) for method in METHODS]
    for _ in METHODS:
        assert process.stdout.readline() == "called\n"  # the fault hits requests that are under way
    process.send_signal(signal.SIGKILL)
    for pending in under_way:
        with pytest.raises(Unreachable):
            pending.result()
    for method in METHODS:
        with pytest.raises(Unreachable):
            talk.begin(method, into, deadline_s=0.5).result()
