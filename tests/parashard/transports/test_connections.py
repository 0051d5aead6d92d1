"""Connections: one request at a time on each, few at once, none reused after anything but a clean answer."""

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from parashard.errors import NonFiniteGradient, ParashardError, QueueFull, Unreachable
from parashard.transports.connections import CONNECTIONS_MAX, FULL_PAUSE_S, OPEN_S, Connections, Exchange
from parashard.transports.stream import Refused
from support.waiting import DEADLINE_S


def soon() -> float:
    return time.monotonic() + DEADLINE_S


class FakeConnection:
    """A connection that only knows its number and its end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Shard:
    """What connections are opened to: counts them, and refuses if told so."""

    def __init__(self) -> None:
        self.opened: list[FakeConnection] = []
        self.refusal: ParashardError | None = None
        self.on_open: Callable[[], object] = lambda: None

    def open(self, deadline_s: float) -> FakeConnection:
        self.on_open()
        if self.refusal is not None:
            raise self.refusal
        self.opened.append(FakeConnection(len(self.opened)))
        return self.opened[-1]


@pytest.fixture
def shard() -> Shard:
    return Shard()


def end(connections: Connections[FakeConnection], connection: FakeConnection, *, clean: bool = True) -> None:
    connections.end(SimpleNamespace(connection=connection), clean=clean)  # type: ignore[arg-type]


def taken_while(connections: Connections[FakeConnection], act: Callable[[], object]) -> FakeConnection:
    """Return what another thread gets that has to wait for `act`."""
    waiting = threading.Event()
    real_wait = connections._changed.wait

    def wait(timeout: float | None = None) -> bool:
        waiting.set()  # under the lock, which only the real wait lets go: `act` cannot come too early
        return real_wait(timeout)

    connections._changed.wait = wait  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(connections.take, soon())
        assert waiting.wait(DEADLINE_S)
        act()
        return taking.result(DEADLINE_S)


class TestTaking:
    """A free connection before a new one, a new one before waiting."""

    def test_the_one_given_back_last_comes_first(self, shard):
        connections = Connections(shard.open, "shard:1")
        taken = [connections.take(soon()) for _ in range(3)]
        for connection in taken:
            end(connections, connection)
        assert [connections.take(soon()) for _ in range(3)] == taken[::-1]
        assert len(shard.opened) == 3

    def test_there_are_never_more_than_the_limit(self, shard):
        connections = Connections(shard.open, "shard:1")
        for _ in range(CONNECTIONS_MAX):
            connections.take(soon())
        with pytest.raises(Unreachable, match="no connection was free") as caught:
            connections.take(time.monotonic() + 0.01)
        assert caught.value.peer == "shard:1"
        assert len(shard.opened) == CONNECTIONS_MAX

    def test_who_waits_gets_the_next_one_that_is_free(self, shard):
        connections = Connections(shard.open, "shard:1", limit=1)
        connection = connections.take(soon())
        assert taken_while(connections, lambda: end(connections, connection)) is connection

    def test_who_waits_gets_a_new_one_in_the_place_of_a_dropped_one(self, shard):
        connections = Connections(shard.open, "shard:1", limit=1)
        first = connections.take(soon())
        second = taken_while(connections, lambda: end(connections, first, clean=False))
        assert (first.closed, second.closed, second is first) == (True, False, False)

    def test_opening_one_may_take_a_few_seconds_however_long_the_request_has(self):
        until_s: list[float] = []

        def open_one(deadline_s: float) -> FakeConnection:
            until_s.append(deadline_s)
            return FakeConnection(0)

        before_s = time.monotonic()
        Connections(open_one, "shard:1").take(before_s + 10 * DEADLINE_S)
        assert before_s + OPEN_S <= until_s[0] <= time.monotonic() + OPEN_S
        Connections(open_one, "shard:1").take(before_s + OPEN_S / 5)
        assert until_s[1] == before_s + OPEN_S / 5

    def test_a_failure_to_open_takes_no_place(self, shard):
        connections = Connections(shard.open, "shard:1", limit=1)
        shard.refusal = Unreachable("no answer")
        for _ in range(2):
            with pytest.raises(Unreachable, match="no answer"):
                connections.take(soon())
        shard.refusal = None
        assert connections.take(soon()).number == 0

    def test_a_shard_that_takes_no_more_is_taken_at_its_word(self, shard):
        connections = Connections(shard.open, "shard:1")
        first = connections.take(soon())
        shard.refusal = QueueFull("8 connections are open already")
        assert taken_while(connections, lambda: end(connections, first)) is first

    def test_a_shard_that_takes_no_more_is_not_asked_again_at_every_request(self, shard):
        asked = []
        shard.on_open = lambda: asked.append(0)
        now_s = [0.0]
        connections = Connections(shard.open, "shard:1", clock=lambda: now_s[0])
        first = connections.take(soon())
        shard.refusal = QueueFull("no memory for a slot")
        for _ in range(5):
            assert taken_while(connections, lambda: end(connections, first)) is first
        assert len(asked) == 2
        now_s[0], shard.refusal = FULL_PAUSE_S, None
        assert connections.take(soon()) is not first, "there may be room again"

    def test_it_is_asked_at_once_when_there_is_no_connection_to_wait_for(self, shard):
        connections = Connections(shard.open, "shard:1", clock=lambda: 0.0)
        first = connections.take(soon())
        shard.refusal = QueueFull("no memory for a slot")
        assert taken_while(connections, lambda: end(connections, first)) is first
        end(connections, first, clean=False)
        shard.refusal = None
        assert connections.take(soon()) is not first

    def test_a_shard_that_takes_none_says_so(self, shard):
        connections = Connections(shard.open, "shard:1")
        shard.refusal = QueueFull("no memory for a slot")
        with pytest.raises(QueueFull, match="no memory for a slot"):
            connections.take(soon())

    def test_a_shard_that_takes_no_more_says_so_when_the_last_one_is_dropped(self, shard):
        connections = Connections(shard.open, "shard:1")
        first = connections.take(soon())
        shard.refusal = QueueFull("no memory for a slot")
        with pytest.raises(QueueFull, match="no memory for a slot"):
            taken_while(connections, lambda: end(connections, first, clean=False))


class TestClosing:
    """After the end nothing is open and no thread waits."""

    def test_all_are_closed_free_or_not(self, shard):
        connections = Connections(shard.open, "shard:1")
        free, used = connections.take(soon()), connections.take(soon())
        end(connections, free)
        connections.close()
        assert (free.closed, used.closed) == (True, True)
        end(connections, used)  # by its last user: it stays closed and is not lent again
        with pytest.raises(Unreachable, match="transport is closed"):
            connections.take(soon())

    def test_a_wait_fails_at_once(self, shard):
        connections = Connections(shard.open, "shard:1", limit=1)
        connections.take(soon())
        with pytest.raises(Unreachable, match="transport is closed"):
            taken_while(connections, connections.close)

    def test_one_that_is_being_opened_is_closed_too(self, shard):
        connections = Connections(shard.open, "shard:1")
        shard.on_open = connections.close
        with pytest.raises(Unreachable, match="transport is closed"):
            connections.take(soon())
        assert shard.opened[0].closed


class TestExchange:
    """A request: begun at once, answered or over."""

    @pytest.fixture
    def connections(self, shard) -> Connections[FakeConnection]:
        return Connections(shard.open, "shard:1", limit=1)

    def begun(
        self, connections, ask=lambda connection: None, answer=lambda connection: "answer", deadline_s=DEADLINE_S
    ):
        return Exchange(connections, ask, answer, time.monotonic() + deadline_s)

    def test_an_answer_frees_the_connection(self, connections, shard):
        assert self.begun(connections).result() == "answer"
        assert connections.take(soon()) is shard.opened[0]

    def test_a_refusal_frees_the_connection_and_is_raised_as_itself(self, connections, shard):
        def refuse(connection: FakeConnection) -> None:
            raise Refused(NonFiniteGradient("step 3", peer="shard:1"))

        with pytest.raises(NonFiniteGradient, match="step 3"):
            self.begun(connections, answer=refuse).result()
        assert connections.take(soon()) is shard.opened[0]
        assert not shard.opened[0].closed

    @pytest.mark.parametrize("error", [Unreachable("gone"), ZeroDivisionError()])
    def test_anything_else_closes_it(self, connections, shard, error):
        def fail(connection: FakeConnection) -> None:
            raise error

        with pytest.raises(type(error)):
            self.begun(connections, answer=fail).result()
        assert shard.opened[0].closed
        assert connections.take(soon()) is shard.opened[1]

    def test_a_failure_to_ask_is_raised_by_result(self, connections, shard):
        def fail(connection: FakeConnection) -> None:
            raise Unreachable("the connection broke")

        begun = self.begun(connections, ask=fail)
        assert shard.opened[0].closed
        for _ in range(2):
            with pytest.raises(Unreachable, match="the connection broke"):
                begun.result()
        begun.cancel()

    def test_a_failure_that_is_kept_keeps_nothing_else(self, connections, shard):  # a dead shard's memory is large
        class Large:
            pass

        kept = []

        def fail(connection: FakeConnection) -> None:
            large = Large()
            kept.append(weakref.ref(large))
            raise Unreachable("the connection broke")

        begun = self.begun(connections, ask=fail)
        assert kept[0]() is None
        begun.cancel()

    def test_a_failure_that_is_a_bug_is_raised_where_it_is(self, connections, shard):
        with pytest.raises(ZeroDivisionError):
            self.begun(connections, ask=lambda connection: 1 / 0)
        assert shard.opened[0].closed

    def test_no_connection_is_a_failure_to_begin(self, connections, shard):
        shard.refusal = Unreachable("no answer")
        begun = self.begun(connections)
        with pytest.raises(Unreachable, match="no answer"):
            begun.result()

    def test_cancelling_closes_the_connection(self, connections, shard):
        begun = self.begun(connections)
        begun.cancel()
        assert shard.opened[0].closed
        with pytest.raises(Unreachable, match="cancelled"):
            begun.result()

    def test_cancelling_ends_a_wait(self, connections, shard):
        inside, ended = threading.Event(), threading.Event()

        def wait(connection: FakeConnection) -> None:
            connection.close = ended.set  # type: ignore[method-assign]
            inside.set()
            assert ended.wait(DEADLINE_S)
            raise Unreachable("the connection was closed")

        begun = self.begun(connections, answer=wait)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(begun.result)
            assert inside.wait(DEADLINE_S)
            begun.cancel()
            with pytest.raises(Unreachable):
                waiting.result(DEADLINE_S)

    def test_cancelling_what_is_over_leaves_the_connection_to_its_next_user(self, connections, shard):
        begun = self.begun(connections)
        begun.result()
        begun.cancel()
        assert not connections.take(soon()).closed
