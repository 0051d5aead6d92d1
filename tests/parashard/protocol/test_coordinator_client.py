"""Finding a coordinator, and what its client repeats and what it does not."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import coordinator_pb2_grpc
from parashard.errors import ConfigurationError, NotReady, ParashardError, StaleIncarnation, Unreachable, WrongRun
from parashard.protocol.coordinator_client import ADDRESS_FILE, CoordinatorClient, find_coordinator, http_port_in
from parashard.protocol.rpc import Server

# --- finding it ---


@pytest.mark.parametrize("address", ["127.0.0.1:5000", "gpu-17.cluster:1", "[::1]:65535"])
def test_an_address_is_taken_as_it_is(address):
    assert find_coordinator(address) == address


@pytest.mark.parametrize(
    "where", ["nowhere", "host:", ":50", "host:0", "host:65536", "host:-1", "host:http", "host:²", "runs/no-such-run"]
)
def test_what_is_neither_an_address_nor_a_folder_is_refused(where):
    with pytest.raises(ConfigurationError, match="neither a run directory nor host:port"):
        find_coordinator(where)


def test_a_run_directory_tells_the_address(tmp_path):
    (tmp_path / ADDRESS_FILE).write_text(json.dumps({"address": "127.0.0.1:7", "run_id": "x"}))
    assert find_coordinator(str(tmp_path)) == "127.0.0.1:7"


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ('{"http": "127.0.0.1:50", "run_id": "x"}', 50),
        ('{"http": "[::1]:50", "run_id": "x"}', 50),
        ('{"http": "127.0.0.1:50", "run_id": "y"}', 0),
        ('{"http": "127.0.0.1:65536", "run_id": "x"}', 0),
        ('{"http": "nowhere", "run_id": "x"}', 0),
        ('{"run_id": "x"}', 0),
        ("[]", 0),
        ("{", 0),
        (None, 0),
    ],
)
def test_a_run_directory_tells_the_http_port_of_its_own_run(tmp_path, text, port):
    if text is not None:
        (tmp_path / ADDRESS_FILE).write_text(text)
    assert http_port_in(tmp_path, "x") == port


def test_a_run_directory_without_a_coordinator_is_unreachable_at_once_without_a_wait(tmp_path):
    with pytest.raises(Unreachable, match=ADDRESS_FILE):
        find_coordinator(str(tmp_path), wait_s=0.0)


class Pauses(threading.Event):
    """Counts the waits instead of waiting, and does something at the third."""

    def __init__(self, at_third: Callable[[], object]) -> None:
        super().__init__()
        self.seen = 0
        self._at_third = at_third

    def wait(self, timeout: float | None = None) -> bool:
        self.seen += 1
        if self.seen == 3:
            self._at_third()
        return self.is_set()


def test_a_run_directory_is_looked_into_until_the_coordinator_has_written(tmp_path):
    pauses = Pauses(lambda: (tmp_path / ADDRESS_FILE).write_text('{"address": "127.0.0.1:7"}'))
    assert find_coordinator(str(tmp_path), cancelled=pauses) == "127.0.0.1:7"
    assert pauses.seen == 3


def test_a_client_that_gives_up_looks_no_longer(tmp_path):
    pauses = Pauses(lambda: pauses.set())  # noqa: PLW0108  # does not exist yet
    with pytest.raises(Unreachable):
        find_coordinator(str(tmp_path), cancelled=pauses)
    assert pauses.seen == 3


@pytest.mark.parametrize("content", ["", "{", '{"run_id": "x"}', "[]", '"127.0.0.1:7"', "null", "\ufeff"])
def test_a_damaged_address_file_is_named(tmp_path, content):
    (tmp_path / ADDRESS_FILE).write_text(content)
    with pytest.raises(ConfigurationError, match=rf"{ADDRESS_FILE} is damaged"):
        find_coordinator(str(tmp_path), wait_s=0.0)


def test_an_address_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / ADDRESS_FILE).mkdir()
    with pytest.raises(ConfigurationError, match=ADDRESS_FILE):
        find_coordinator(str(tmp_path), wait_s=0.0)


# --- calling it ---


def test_what_a_call_waits_for_is_told_once_after_a_while_with_how_long(virtual_time):
    told: list[str] = []
    client = CoordinatorClient("127.0.0.1:7", retry_budget_s=20.0, tell=told.append)

    def call() -> None:
        raise Unreachable("no answer: Connection refused")

    try:
        with pytest.raises(Unreachable):
            client.retry(call)
    finally:
        client.close()
    assert len(virtual_time.pauses_s) > 1
    assert [re.sub(r"\d\d:\d\d:\d\d", "T", text) for text in told] == [
        "no answer: Connection refused; asking again until T"
    ]


def test_a_short_wait_is_not_spoken_of(virtual_time):
    told: list[str] = []
    client = CoordinatorClient("127.0.0.1:7", retry_budget_s=20.0, tell=told.append)
    answers = iter([Unreachable("not yet"), Unreachable("not yet"), None])

    def call() -> None:
        answer = next(answers)
        if answer is not None:
            raise answer

    try:
        client.retry(call)
    finally:
        client.close()
    assert told == []


class Scripted(coordinator_pb2_grpc.CoordinatorServicer):
    """Answers every call with the next of `answers`: an error is raised, anything else returned."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.calls: list[str] = []
        self.deadlines_s: list[float] = []

    def _next(self, name: str, context: Any) -> Any:
        self.calls.append(name)
        self.deadlines_s.append(context.time_remaining())
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


for _rpc in pb.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name:
    setattr(Scripted, _rpc, lambda self, request, context, name=_rpc: self._next(name, context))


@pytest.fixture(scope="module")
def _coordinator() -> Iterator[tuple[Scripted, str]]:
    service, server = Scripted(), Server("127.0.0.1:0")
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, server.grpc)
    server.start()
    yield service, server.address
    server.stop(0.0)


@pytest.fixture
def coordinator(_coordinator: tuple[Scripted, str]) -> Scripted:
    """Return the module's coordinator, with nothing asked of it yet."""
    service, _ = _coordinator
    service.answers, service.calls, service.deadlines_s = [], [], []
    return service


@pytest.fixture
def address(_coordinator: tuple[Scripted, str]) -> str:
    """Return where it listens."""
    return _coordinator[1]


@pytest.fixture
def client(_coordinator: tuple[Scripted, str]) -> Iterator[CoordinatorClient]:
    """Return a client of it."""
    client = CoordinatorClient(_coordinator[1], retry_budget_s=2.0)
    yield client
    client.close()


CALLS: dict[str, tuple[Callable[[CoordinatorClient], Any], Any, bool]] = {
    "GetJob": (lambda c: c.get_job(), pb.GetJobReply(run_id="x"), True),
    "RegisterShard": (
        lambda c: c.register_shard(pb.RegisterShardRequest()),
        pb.RegisterShardReply(coordinator_incarnation=1),
        False,  # the next announcement is the retry
    ),
    "RegisterWorker": (
        lambda c: c.register_worker(pb.RegisterWorkerRequest()),
        pb.RegisterWorkerReply(name="worker-0"),
        True,
    ),
    "GetView": (lambda c: c.get_view("x"), pb.GetViewReply(view=2), False),
    "Lease": (lambda c: c.lease(pb.LeaseRequest()), pb.LeaseReply(view=2), False),
    "GetStatus": (lambda c: c.get_status(), pb.GetStatusReply(job="digits"), False),
    "Scale": (lambda c: c.scale(3), pb.ScaleReply(workers_wanted=3), False),
    "Supervise": (lambda c: c.supervise(pb.SuperviseRequest(), 5.0), pb.SuperviseReply(reason="x"), False),
    "CreateCheckpoint": (
        lambda c: c.create_checkpoint(pb.CreateCheckpointRequest(request=3)),
        pb.CreateCheckpointReply(checkpoint="j1", steps=8),
        False,
    ),
    "Follow": (lambda c: c.follow(pb.FollowRequest(handled=4)), pb.FollowReply(steps_total=8), False),
}


def test_every_call_of_the_contract_is_wrapped():
    assert set(CALLS) == set(pb.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_a_deadline_and_gives_its_answer(name, coordinator, client):
    call, reply, _ = CALLS[name]
    coordinator.answers = [reply]
    assert call(client) == reply
    assert coordinator.calls == [name]
    assert 0 < coordinator.deadlines_s[0] < 60


@pytest.mark.parametrize("name", CALLS)
def test_what_may_be_repeated_is_and_what_may_not_is_not(name, coordinator, client, virtual_time):
    call, reply, patient = CALLS[name]
    coordinator.answers = [NotReady("starting"), NotReady("starting"), reply]
    if patient:
        assert call(client) == reply
        assert coordinator.calls == [name] * 3
    else:
        with pytest.raises(NotReady, match="starting"):
            call(client)
        assert coordinator.calls == [name]


def test_it_knows_whether_the_last_call_was_answered(coordinator, client):
    silent, reply = Unreachable("no"), pb.GetViewReply(view=2)
    coordinator.answers = [reply, silent, NotReady("no"), silent, WrongRun("no")]
    found = [client.unanswered]
    while coordinator.answers:
        with suppress(ParashardError):
            client.get_view("x")
        found.append(client.unanswered)
    assert found == [False, False, True, False, True, False], "a refusal is an answer"


@pytest.mark.parametrize("error", [WrongRun, StaleIncarnation, ConfigurationError])
def test_only_retry_later_is_retried(error, coordinator, client):
    coordinator.answers = [error("no")]
    with pytest.raises(error) as caught:
        client.get_job()
    assert (caught.value.peer, coordinator.calls) == (client.address, ["GetJob"])


def test_retries_end_with_the_budget(coordinator, client, virtual_time):
    coordinator.answers = [NotReady("starting")] * 1000
    with pytest.raises(NotReady):
        client.retry(lambda: client.get_view("x"))
    assert 2.0 <= virtual_time.now_s < 4.0


def test_a_process_that_was_suspended_while_it_waited_has_its_budget_left(client, virtual_time):
    suspended_s = iter([0.0, 1000.0, 0.0])

    def call() -> str:
        for seconds in suspended_s:
            virtual_time.now_s += seconds
            raise NotReady("starting")
        return "answered"

    assert client.retry(call) == "answered"
    assert virtual_time.now_s > 1000.0


def test_a_view_is_waited_for_within_the_budget(coordinator, client, virtual_time):
    coordinator.answers = [NotReady("waiting for shard 1 to register"), pb.GetViewReply(view=3)]
    assert client.retry(lambda: client.get_view("x")).view == 3


# --- a coordinator that was started again listens elsewhere ---


@pytest.fixture
def moved(tmp_path) -> Iterator[CoordinatorClient]:
    """Return a client that knows a run directory, and in it the address of a coordinator that is no more."""
    gone = Server("127.0.0.1:0")
    gone.start()
    gone.stop(0.0)
    client = CoordinatorClient(gone.address, retry_budget_s=2.0, where=str(tmp_path))
    yield client
    client.close()


def write_address(folder, address):
    (folder / ADDRESS_FILE).write_text(json.dumps({"address": address, "run_id": "x"}))


def test_a_call_without_an_answer_is_repeated_where_the_run_directory_says(
    moved, tmp_path, coordinator, address, virtual_time
):
    write_address(tmp_path, address)
    coordinator.answers = [pb.GetJobReply(run_id="x")]
    assert moved.get_job().run_id == "x"
    assert moved.address == address


def test_a_single_call_fails_and_the_next_one_goes_to_the_new_address(moved, tmp_path, coordinator, address):
    write_address(tmp_path, address)
    with pytest.raises(Unreachable):
        moved.get_status()
    coordinator.answers = [pb.GetStatusReply(job="digits")]
    assert moved.get_status().job == "digits"


def test_a_client_that_looks_before_it_calls_meets_the_new_coordinator(moved, tmp_path, coordinator, address):
    assert not moved.reconnect_if_moved()
    write_address(tmp_path, address)
    assert moved.reconnect_if_moved()
    assert not moved.reconnect_if_moved()
    coordinator.answers = [pb.GetStatusReply(job="digits")]
    assert moved.get_status().job == "digits"


@pytest.mark.parametrize("content", ["", "{", "{}", "null"])
def test_an_address_that_cannot_be_read_now_changes_nothing(moved, tmp_path, content):
    (tmp_path / ADDRESS_FILE).write_text(content)
    before = moved.address
    with pytest.raises(Unreachable):
        moved.get_status()
    assert moved.address == before


def test_a_lease_call_lasts_as_long_as_the_coordinator_may_wait(coordinator, client):
    coordinator.answers = [pb.LeaseReply()]
    client.lease(pb.LeaseRequest(wait_s=7.0), deadline_s=1.0)
    assert coordinator.deadlines_s == [pytest.approx(8.0, abs=0.5)]
