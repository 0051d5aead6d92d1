"""Which transport is used: the first that works, found out once for each incarnation of a shard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parashard.errors import (
    ConfigurationError,
    MalformedFrame,
    NotReady,
    ParashardError,
    PeerFailed,
    QueueFull,
    StaleIncarnation,
    Unreachable,
    WrongRun,
)
from parashard.protocol.messages import Ack, Buffers, PushResult
from parashard.transports import choosing
from parashard.transports.base import ShardAddress
from parashard.transports.choosing import SHM, TCP, Candidate, ChosenTransport, connect_by
from support.fake_plane import GREETING
from support.logs import capture_logs
from support.shared_shard import DEADLINE_S, pull_of, push_of

WHERE = ShardAddress("127.0.0.1:1", 1, "127.0.0.1:2", "/nowhere/shard.sock")


class Answered:
    def __init__(self, value: Any) -> None:
        self._value = value

    def start(self) -> None: ...

    def result(self) -> Any:
        return self._value

    def cancel(self) -> None: ...


class FakeCandidate:
    """A transport whose HELLO ends as a test says."""

    def __init__(self, outcome: ParashardError | None = None) -> None:
        self.outcome = outcome
        self.on_greet: Callable[[], None] = lambda: None
        self.greeted_s: list[float] = []
        self.requests: list[str] = []
        self.closed = 0

    def greet(self, deadline_s: float) -> None:
        self.greeted_s.append(deadline_s)
        self.on_greet()
        if self.outcome is not None:
            raise self.outcome

    def push(self, push: Any, deadline_s: float) -> Any:
        self.requests.append("push")
        return Answered(Ack(PushResult.APPLIED, 1, None))

    def pull(self, run: Any, into: Buffers, deadline_s: float, read: Any = None) -> Any:
        self.requests.append("pull")
        return Answered(1)

    def close(self) -> None:
        self.closed += 1

    def candidate(self, kind: str, reason: str | None = None) -> Candidate:
        return Candidate(kind, lambda where: reason, lambda where, greeting: self)


def chosen(*candidates: Candidate) -> ChosenTransport:
    return ChosenTransport(WHERE, GREETING, candidates)


def push(transport: ChosenTransport, deadline_s: float = DEADLINE_S) -> Ack:
    return transport.push(push_of(np.ones(1, np.float32)), deadline_s).result()


ELSEWHERE = [Unreachable("no answer"), QueueFull("no slot"), MalformedFrame("bad memory"), PeerFailed("broken")]


class TestChoosing:
    """In order of preference, by trying."""

    def test_nothing_is_tried_before_the_first_request(self) -> None:
        shm = FakeCandidate()
        transport = chosen(shm.candidate("shm"))
        assert shm.greeted_s == []
        push(transport)
        assert len(shm.greeted_s) == 1

    def test_the_first_that_works_carries_everything(self) -> None:
        shm, tcp = FakeCandidate(), FakeCandidate()
        transport = chosen(shm.candidate("shm"), tcp.candidate("tcp"))
        push(transport)
        assert transport.pull(pull_of(), Buffers(), DEADLINE_S).result() == 1
        assert (shm.requests, len(shm.greeted_s)) == (["push", "pull"], 1)
        assert (tcp.requests, tcp.greeted_s) == ([], [])

    @pytest.mark.parametrize("error", ELSEWHERE, ids=lambda error: type(error).__name__)
    def test_where_one_does_not_work_the_next_is_tried_and_it_is_closed(self, error: ParashardError) -> None:
        shm, tcp = FakeCandidate(error), FakeCandidate()
        transport = chosen(shm.candidate("shm"), tcp.candidate("tcp"))
        push(transport)
        push(transport)
        assert (shm.closed, shm.requests, len(shm.greeted_s)) == (1, [], 1)
        assert tcp.requests == ["push", "push"]

    def test_what_cannot_work_is_not_tried(self) -> None:
        shm, tcp = FakeCandidate(), FakeCandidate()
        push(chosen(shm.candidate("shm", "no path"), tcp.candidate("tcp")))
        assert shm.greeted_s == []

    @pytest.mark.parametrize("error", [StaleIncarnation("2"), WrongRun("other"), NotReady("stopping")])
    def test_what_the_shard_would_say_on_any_way_is_the_answer(self, error: ParashardError) -> None:  # P2, P3
        shm, tcp = FakeCandidate(error), FakeCandidate()
        transport = chosen(shm.candidate("shm"), tcp.candidate("tcp"))
        with pytest.raises(type(error)):
            push(transport)
        assert tcp.greeted_s == []
        shm.outcome = None
        push(transport)
        assert shm.requests == ["push"], "the next request looks again"

    def test_where_nothing_works_the_error_says_why_and_the_next_request_looks_again(self) -> None:
        shm = FakeCandidate(Unreachable("no answer"))
        transport = chosen(shm.candidate("shm"))
        with pytest.raises(Unreachable, match="no way to the shard works: shm: no answer") as caught:
            push(transport)
        assert caught.value.peer == WHERE.address
        shm.outcome = None
        push(transport)

    def test_a_request_that_cannot_begin_fails_when_it_is_waited_for(self) -> None:
        pending = chosen(FakeCandidate(Unreachable("no answer")).candidate("shm")).push(
            push_of(np.ones(1, np.float32)), DEADLINE_S
        )
        pending.cancel()
        with pytest.raises(Unreachable):
            pending.result()

    def test_no_way_takes_longer_than_its_share_or_than_the_request_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shm, tcp = FakeCandidate(Unreachable("slow")), FakeCandidate()
        push(chosen(shm.candidate("shm"), tcp.candidate("tcp")))
        assert shm.greeted_s == [choosing.GREET_S]
        hurried = FakeCandidate()
        with monkeypatch.context() as patch:
            patch.setattr(choosing, "GREET_S", 2 * DEADLINE_S)
            push(chosen(hurried.candidate("shm")), deadline_s=DEADLINE_S)
        assert 0.0 < hurried.greeted_s[0] <= DEADLINE_S

    def test_threads_choose_once_together(self) -> None:
        shm, trying, let_go = FakeCandidate(), threading.Event(), threading.Event()

        def slowly() -> None:
            trying.set()
            let_go.wait(DEADLINE_S)

        shm.on_greet = slowly
        transport = chosen(shm.candidate("shm"))
        threads = [threading.Thread(target=push, args=(transport,)) for _ in range(4)]
        threads[0].start()
        assert trying.wait(DEADLINE_S)
        with pytest.raises(Unreachable, match="before the deadline"):
            push(transport, deadline_s=0.005)
        for thread in threads[1:]:
            thread.start()
        let_go.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert (len(shm.greeted_s), shm.requests) == (1, ["push"] * 4)

    def test_closing_ends_what_is_being_tried_and_what_comes_later(self) -> None:
        shm, tcp = FakeCandidate(Unreachable("closed under it")), FakeCandidate()
        transport = chosen(shm.candidate("shm"), tcp.candidate("tcp"))
        shm.on_greet = transport.close
        with pytest.raises(Unreachable, match="the transport is closed"):
            push(transport)
        assert shm.closed == 2, "by the one who closed and by the one who tried"
        assert (tcp.closed, tcp.greeted_s) == (1, [])

    def test_closing_closes_what_was_chosen(self) -> None:
        shm = FakeCandidate()
        transport = chosen(shm.candidate("shm"))
        transport.close()
        with pytest.raises(Unreachable):
            push(transport)
        shm, transport = FakeCandidate(), chosen((other := FakeCandidate()).candidate("shm"))
        push(transport)
        transport.close()
        assert other.closed == 1

    def test_the_choice_is_logged_once_with_what_stood_against_the_others(self) -> None:
        transport = chosen(FakeCandidate(QueueFull("no slot")).candidate("shm"), FakeCandidate().candidate("tcp"))
        with capture_logs() as logs:
            push(transport)
            push(transport)
        assert [(log["event"], log["shard"], log["kind"], log["passed_over"]) for log in logs] == [
            ("transport", 0, "tcp", {"shm": "no slot"})
        ]


class TestKinds:
    """What a job may say."""

    @pytest.mark.parametrize(
        ("candidate", "where", "reason"),
        [
            (SHM, ShardAddress("a:1", 1, "a:2", ""), "the shard offers no shared memory"),
            (TCP, ShardAddress("a:1", 1, "", "/x"), "the shard has no stream server"),
        ],
    )
    def test_a_way_needs_an_address(self, candidate: Candidate, where: ShardAddress, reason: str) -> None:
        assert candidate.reason(where) == reason

    def test_shared_memory_needs_a_machine_that_can(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choosing, "can_share", lambda: False)
        assert SHM.reason(WHERE) == "this machine cannot share weights"
        assert TCP.reason(WHERE) is None

    @pytest.mark.parametrize("kind", ["shm", "tcp"])
    def test_what_a_job_asks_for_is_used_or_the_error_says_why_not(self, kind: str) -> None:
        transport = connect_by(kind)(ShardAddress("127.0.0.1:1", 1), GREETING)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=f"allows no way to the shard: {kind}: the shard"):
            push(transport)  # type: ignore[arg-type]

    def test_grpc_is_settled_on_without_a_hello_and_that_is_logged_too(self) -> None:
        transport = connect_by("grpc")(WHERE, GREETING)
        with capture_logs() as logs, pytest.raises(Unreachable, match="no answer"):  # it is the push that failed
            push(transport, deadline_s=DEADLINE_S)  # type: ignore[arg-type]
        transport.close()
        assert [(log["event"], log["kind"], log["passed_over"]) for log in logs] == [("transport", "grpc", {})]

    def test_by_itself_a_job_ends_with_grpc(self) -> None:
        transport = connect_by("auto")(ShardAddress("127.0.0.1:1", 1, "127.0.0.1:1", "/nowhere/x.sock"), GREETING)
        with capture_logs() as logs, pytest.raises(Unreachable):
            push(transport)  # type: ignore[arg-type]
        transport.close()
        assert [(log["kind"], sorted(log["passed_over"])) for log in logs] == [("grpc", ["shm", "tcp"])]
