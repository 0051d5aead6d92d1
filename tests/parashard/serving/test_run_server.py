"""`parashard serve` in this process: what its ports answer, what they refuse, and a subscriber over its death."""

from __future__ import annotations

import json
import math
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard._proto import serving_pb2 as pb
from parashard._proto import serving_pb2_grpc
from parashard.client.pulled_rows import TableSet
from parashard.errors import (
    ConfigurationError,
    LimitExceeded,
    MalformedFrame,
    NotAllowed,
    NotReady,
    QueueFull,
    StoreFailed,
    UnknownVariable,
    Unreachable,
    WrongRun,
)
from parashard.plan.embedding import EmbeddingTable, RowDtype, mixed, unmixed
from parashard.plan.optimizers import SGD
from parashard.plan.variables import Initializer
from parashard.protocol import rpc
from parashard.security.identity import Role
from parashard.serving import messages, service
from parashard.serving import served as served_module
from parashard.serving.served import WAIT_S_MAX, ServedRun
from parashard.serving.server import Ports
from parashard.telemetry.http import QUESTION_BYTES_MAX
from support.certificates import WRONG_CA, Certificates
from support.checkpoint_cases import model_of
from support.in_process import SEED
from support.live_cases import TABLES as LIVE_TABLES
from support.live_cases import LiveShards
from support.serving_cases import TABLE, Committer, ShardLife, keys_of_shard, watcher_of
from support.store_fakes import MemoryStore
from support.waiting import DEADLINE_S, eventually

KEYS = [int(key) for shard in range(2) for key in unmixed(keys_of_shard(shard, 3))]
MIXED = [int(key) for shard in range(2) for key in keys_of_shard(shard, 3)]
TABLES = TableSet((EmbeddingTable(TABLE, 2, SGD(learning_rate=1.0), Initializer("normal", 0.5)),), seed=5)


def run_of(store: MemoryStore) -> ServedRun:
    return ServedRun(watcher_of(store), TABLES, "small")


class Job:
    """A job's checkpoints, and servers over them, one after another at one address."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.committer = Committer(store)
        self.committer.write_plan()
        self.lives = [ShardLife(0), ShardLife(1)]
        self.step = 0
        self.tables = TABLES
        self.ports: Ports | None = None

    def commit(self, shard: int, rows: dict, gone: Any = ()) -> None:
        self.step += 1
        self.committer.commit(self.lives[shard], [self.step], rows, gone, written_at=50.0)

    def begin(self) -> None:
        self.commit(0, {MIXED[0]: (1.0, 2.0)})
        self.commit(1, {MIXED[3]: (3.0, 4.0)})

    def serve(self, port: int = 0, **options: Any) -> Ports:
        self.run = ServedRun(watcher_of(self.store), self.tables, "small", clock=lambda: 60.0)
        self.ports = Ports(self.run, "127.0.0.1", port, 0, **options)
        self.ports.start()
        return self.ports

    def stop(self) -> None:
        if self.ports is not None:
            self.ports.stop()
            self.ports = None


@pytest.fixture
def job(store: MemoryStore) -> Iterator[Job]:
    job = Job(store)
    yield job
    job.stop()


@pytest.fixture
def served(job: Job) -> Job:
    job.begin()
    job.serve()
    return job


def asked(job: Job, path: str, body: bytes | None = None) -> tuple[int, Any]:
    assert job.ports is not None
    request = urllib.request.Request(f"http://{job.ports.http_address}{path}", data=body)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.fixture
def stub(served: Job) -> Iterator[Any]:
    with rpc.connect(served.ports.address) as channel:
        yield serving_pb2_grpc.ServingStub(channel)


def test_rows_over_http(served: Job) -> None:
    body = json.dumps({"table": TABLE, "keys": [KEYS[3], KEYS[0], 4711]}).encode()
    status, found = asked(served, "/v1/rows", body)
    assert (status, found["present"]) == (200, [True, True, False])
    assert found["rows"][:2] == [[3.0, 4.0], [1.0, 2.0]]
    assert found["rows"][2] == TABLES.first_rows(TABLE, mixed([4711]))[0].tolist()
    assert found["versions"] == ["p1/s0/i1/c1", "p1/s1/i1/c1"]
    assert asked(served, f"/v1/rows?table={TABLE}&keys={KEYS[3]},{KEYS[0]},4711") == (200, found)


def test_a_variable_over_http_with_null_where_json_has_no_number(served: Job) -> None:
    status, found = asked(served, "/v1/variable?name=dense/bias")
    due = model_of(1)["dense/bias"]
    assert (status, found["shape"]) == (200, [5])
    assert found["values"] == [float(value) if np.isfinite(value) else None for value in due]


def test_the_status_over_http(served: Job) -> None:
    status, found = asked(served, "/v1/status")
    assert status == 200
    assert found["tables"] == {TABLE: {"dimension": 2, "rows": 2}}
    assert found["variables"] == {"dense/bias": [5], "dense/weight": [8, 4]}
    assert found["behind"] == {"versions": 0, "seconds": 10.0}
    assert (found["done"], found["problem"]) == (False, "")


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/v1/rows", b"[", 400, "the body is not JSON"),
        ("/v1/rows", b"[" * 100_000, 400, "the body is not JSON"),
        ("/v1/rows", b"[]", 400, 'due: {"table": NAME, "keys": [whole numbers of 64 bits]}'),
        ("/v1/rows", b'{"table": "user", "keys": 5}', 400, "due:"),
        ("/v1/rows", b'{"table": "user", "keys": [1.5]}', 400, "key 1.5: allowed: whole numbers of up to 64 bits"),
        ("/v1/rows", b'{"table": "user", "keys": [true]}', 400, "key True: allowed"),
        ("/v1/rows", b'{"table": "user", "keys": [18446744073709551616]}', 400, "key 18446744073709551616: allowed"),
        ("/v1/rows", b'{"table": "usr", "keys": [1]}', 404, "table 'usr' is none of the job's: user"),
        ("/v1/rows?table=user", None, 400, "allowed after the question mark: table=..., keys=..., once each"),
        ("/v1/rows?table=user&keys=x", None, 400, "keys=x: allowed: whole numbers with commas between"),
        ("/v1/rows?" + "&".join("a=1" for _ in range(99)), None, 400, "allowed after the question mark"),
        ("/v1/variable?name=bias", None, 404, "variable 'bias' is none of the job's: dense/bias, dense/weight"),
        ("/v1/status?x=1", None, 400, "allowed after the question mark: nothing"),
    ],
)
def test_what_http_refuses_says_what_is_allowed(
    served: Job, path: str, body: bytes | None, status: int, told: str
) -> None:
    found, answer = asked(served, path, body)
    assert (found, set(answer)) == (status, {"error", "code"})
    assert told in answer["error"]


def test_more_keys_than_a_request_may_have(served: Job, stub: Any) -> None:
    keys = served_module.KEYS_MAX + 1
    status, answer = asked(served, "/v1/rows", json.dumps({"table": TABLE, "keys": [1] * keys}).encode())
    assert (status, answer["error"]) == (
        400,
        "65,537 keys of table 'user'; allowed: at most 65,536 in one request",
    )
    request = pb.GetRowsRequest(table=TABLE, keys=b"12345678" * keys)
    with pytest.raises(LimitExceeded, match="65,537 keys"), rpc.our_errors("it"):
        stub.GetRows(request, timeout=DEADLINE_S)


def test_a_body_that_is_too_long_is_not_read(served: Job) -> None:
    request = urllib.request.Request(f"http://{served.ports.http_address}/v1/rows", data=b"x" * 10)
    request.add_unredirected_header("Content-Length", str(QUESTION_BYTES_MAX + 1))
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=DEADLINE_S)
    with refused.value as answer:
        assert answer.code == 413


@pytest.mark.parametrize(("length", "status"), [(None, 411), ("-1", 411), ("1e3", 411), ("9" * 40, 411), ("50", 400)])
def test_a_body_without_its_length_or_cut_short_is_refused(served: Job, length: str | None, status: int) -> None:
    host, _, port = served.ports.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock:
        head = f"Content-Length: {length}\r\n" if length else ""
        sock.sendall(f"POST /v1/rows HTTP/1.0\r\n{head}\r\n{json.dumps({'table': TABLE, 'keys': [1]})}".encode())
        sock.shutdown(socket.SHUT_WR)
        assert sock.makefile("rb").readline().split()[1] == str(status).encode()


def test_rows_and_variables_over_grpc(served: Job, stub: Any) -> None:
    keys = np.array([KEYS[3], 4711], np.uint64).astype("<u8").tobytes()
    found = stub.GetRows(pb.GetRowsRequest(table=TABLE, keys=keys), timeout=DEADLINE_S)
    rows = messages.floats_of(found.rows, found.row_elements)
    assert rows[0].tolist() == [3.0, 4.0]
    assert rows[1].tobytes() == TABLES.first_rows(TABLE, mixed([4711])).tobytes()
    assert found.present == b"\1\0"
    whole = model_of(1)["dense/weight"]
    some = stub.GetVariable(pb.GetVariableRequest(variable="dense/weight", first=3, elements=5), timeout=DEADLINE_S)
    assert some.values == whole.reshape(-1)[3:8].astype("<f4").tobytes()
    assert list(some.shape) == [8, 4]
    with pytest.raises(LimitExceeded, match="allowed: within"), rpc.our_errors("it"):
        stub.GetVariable(pb.GetVariableRequest(variable="dense/weight", first=30, elements=5), timeout=DEADLINE_S)


def test_another_run_is_refused(served: Job, stub: Any) -> None:
    with pytest.raises(WrongRun), rpc.our_errors("it"):
        list(stub.Subscribe(pb.SubscribeRequest(run_id="another"), timeout=DEADLINE_S))


def test_subscribers_beyond_the_bound_come_later(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SUBSCRIBERS_MAX", 0)
    job.begin()
    job.serve()
    with rpc.connect(job.ports.address) as channel, pytest.raises(QueueFull), rpc.our_errors("it"):
        list(serving_pb2_grpc.ServingStub(channel).Subscribe(pb.SubscribeRequest(), timeout=DEADLINE_S))


def test_before_the_first_checkpoint_it_says_what_it_waits_for(job: Job) -> None:
    ports = job.serve()
    status, answer = asked(job, "/v1/status")
    assert status == 503
    assert answer["error"] == ("no checkpoint of job 'small' can be served yet: plan 1: not every shard has saved yet")
    with pytest.raises(NotReady, match="no checkpoint of job 'small'"):
        ps.subscribe(ports.address, timeout_s=0.0)


def test_a_request_waits_until_something_newer_is_committed_and_no_longer(job: Job) -> None:
    job.begin()
    run = run_of(job.store)
    run.look()
    waits = []

    class Condition(threading.Condition):
        """Is waited for once: meanwhile a shard commits, and the store is looked at."""

        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            job.commit(0, {})
            run.look()
            return True

    run._changed = Condition(threading.RLock())
    assert run.wait(lambda now: True, 30.0).shards[0].version.id.number == 1
    assert waits == []
    assert run.wait(lambda now: now.shards[0].version.id.number > 1, 3600.0).shards[0].version.id.number == 2
    assert len(waits) == 1
    assert waits[0] <= WAIT_S_MAX


def newer_than_all(stub: Any) -> pb.SubscribeRequest:
    """Return the request of one who has what is not there yet: it waits."""
    served = stub.GetServed(pb.GetServedRequest(), timeout=DEADLINE_S)
    request = pb.SubscribeRequest(held=[pb.HeldShard(version=version) for version in served.sight.served])
    for held in request.held:
        held.version.number += 10**6
    return request


def test_a_subscriber_that_is_gone_is_no_longer_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SUBSCRIBERS_MAX", 1)
    monkeypatch.setattr(served_module, "ASK_S", 0.01)
    job.begin()
    job.serve()
    with rpc.connect(job.ports.address) as channel:
        stub = serving_pb2_grpc.ServingStub(channel)

        def is_full() -> bool:
            try:
                with rpc.our_errors("it"):
                    list(stub.Subscribe(pb.SubscribeRequest(), timeout=DEADLINE_S))
            except QueueFull:
                return True
            return False

        request = newer_than_all(stub)
        request.wait_s = math.inf
        call = stub.Subscribe(request, timeout=DEADLINE_S)
        eventually(is_full, "it waits")
        call.cancel()
        eventually(lambda: not is_full(), "its place is free")


def test_a_wait_of_nan_seconds_is_refused(served: Job, stub: Any) -> None:
    request = newer_than_all(stub)
    request.wait_s = math.nan
    with pytest.raises(MalformedFrame, match="wait_s is NaN"), rpc.our_errors("it"):
        list(stub.Subscribe(request, timeout=DEADLINE_S))
    with pytest.raises(ConfigurationError, match="timeout_s must be a number of seconds"):
        ps.subscribe(served.ports.address, timeout_s=math.nan)


@pytest.mark.parametrize(
    ("error", "told"),
    [(StoreFailed("no answer"), "no answer"), (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug")],
)
def test_a_look_that_fails_is_told_and_what_is_served_stays(job: Job, error: Exception, told: str) -> None:
    job.begin()
    run = run_of(job.store)
    run.look()
    fault = job.store.fail("folders", error=error)
    run.look()
    assert (fault.fired, run.watcher.sight.problem) == (1, told)
    assert [str(version.id) for version in run.published().versions] == ["p1/s0/i1/c1", "p1/s1/i1/c1"]
    run.look()
    assert run.watcher.sight.problem == ""


class TestInsideTls:
    @pytest.fixture
    def secured(self, job: Job, certificates: Certificates) -> Job:
        job.begin()
        job.serve(credentials=certificates.of(Role.SERVER), lookups_over_http=False)
        return job

    def test_a_reader_subscribes(self, secured: Job, certificates: Certificates) -> None:
        with ps.subscribe(secured.ports.address, tls_dir=certificates.folder(Role.READER)) as held:
            assert held.rows(TABLE, [KEYS[0]]).tolist() == [[1.0, 2.0]]

    @pytest.mark.parametrize("role", sorted(set(Role) - {Role.READER}))
    def test_no_other_role_does(self, secured: Job, certificates: Certificates, role: Role) -> None:
        channel = rpc.connect(secured.ports.address, certificates.of(role))
        stub = serving_pb2_grpc.ServingStub(channel)
        with pytest.raises(NotAllowed, match="allowed: reader"), rpc.our_errors("it"):
            stub.GetServed(pb.GetServedRequest(), timeout=DEADLINE_S)
        with pytest.raises(NotAllowed, match="allowed: reader"), rpc.our_errors("it"):
            list(stub.Subscribe(pb.SubscribeRequest(), timeout=DEADLINE_S))
        channel.close()

    def test_a_certificate_of_another_role_is_refused_before_it_is_shown(
        self, secured: Job, certificates: Certificates
    ) -> None:
        with pytest.raises(ConfigurationError, match="this process is a reader"):
            ps.subscribe(secured.ports.address, tls_dir=certificates.folder(Role.WORKER))

    @pytest.mark.parametrize("kind", [None, WRONG_CA])
    def test_without_a_right_certificate_nothing_comes(
        self, secured: Job, certificates: Certificates, kind: str | None
    ) -> None:
        folder = None if kind is None else certificates.folder(Role.READER, kind)
        with pytest.raises(Unreachable):
            ps.subscribe(secured.ports.address, tls_dir=folder, timeout_s=0.0)

    def test_http_which_has_no_tls_answers_no_lookup(self, secured: Job) -> None:
        for path in ("/v1/status", f"/v1/rows?table={TABLE}&keys=1", "/v1/variable?name=dense/bias"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://{secured.ports.http_address}{path}", timeout=DEADLINE_S)
            with refused.value as answer:
                assert answer.code == 404
        with urllib.request.urlopen(f"http://{secured.ports.http_address}/readyz", timeout=DEADLINE_S) as answer:
            assert answer.status == 200


class TestLive:
    def test_a_subscriber_follows_and_is_told_of_a_return(self) -> None:
        job = LiveShards()
        job.push(0, [1, 2])
        run = ServedRun(job.watcher(), TableSet(LIVE_TABLES, SEED), "live", clock=lambda: 60.0)
        ports = Ports(run, "127.0.0.1", 0, 0)
        ports.start()
        try:
            with ps.subscribe(ports.address) as held:
                assert (held.fresh, held.resyncs) == (True, 0)
                job.push(0, [3])
                held.wait_for(lambda held: held.versions[0].number == 2, DEADLINE_S)
                assert (held.behind.versions, held.behind.seconds < DEADLINE_S, held.steps) == (0, True, 0)
                job.restore(0, 1)
                held.wait_for(lambda held: held.resyncs == 1, DEADLINE_S)
                assert str(held.versions[0]) == "p1/s0/i2/c1"
                assert held.look_up("user", unmixed(job.keys[0])).present.tolist().count(True) == 2
                url = f"http://{ports.http_address}/v1/status"
                with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                    status = json.loads(answer.read())
                assert (status["fresh"], status["resyncs"], status["behind"]["versions"]) == (True, 1, 0)
                with rpc.connect(ports.address) as channel, pytest.raises(WrongRun) as refused, rpc.our_errors("it"):
                    list(serving_pb2_grpc.ServingStub(channel).Subscribe(pb.SubscribeRequest(), timeout=DEADLINE_S))
                told = "live ones (--fresh) are served here; the subscriber has committed versions"
                assert told in str(refused.value)
        finally:
            ports.stop()


class TestSubscriber:
    @pytest.mark.parametrize(("dtype", "tenth"), [("float16", 0.0999755859375), ("bfloat16", 0.10009765625)])
    def test_rows_that_are_kept_in_two_bytes_are_the_same_numbers(
        self, job: Job, dtype: RowDtype, tenth: float
    ) -> None:
        table = EmbeddingTable(TABLE, 2, SGD(learning_rate=1.0), Initializer("normal", 0.5), dtype=dtype)
        job.tables = TableSet((table,), seed=5)
        job.committer.dtype = dtype
        job.commit(0, {MIXED[0]: (0.1, 2.0)})
        job.commit(1, {})
        with ps.subscribe(job.serve().address) as held:
            found = held.rows(TABLE, [KEYS[0], 4711])
            assert found.dtype == np.float32
            assert found[0].tolist() == [tenth, 2.0]
            assert found[1].tobytes() == job.tables.first_rows(TABLE, mixed([4711])).tobytes()
            assert found[1].tobytes() != TABLES.first_rows(TABLE, mixed([4711])).tobytes()

    def test_it_follows_what_is_committed(self, served: Job) -> None:
        with ps.subscribe(served.ports.address) as held:
            assert held.rows(TABLE, [KEYS[0], KEYS[3]]).tolist() == [[1.0, 2.0], [3.0, 4.0]]
            assert held.variable("dense/bias").tobytes() == model_of(1)["dense/bias"].tobytes()
            assert held.behind.versions == 0
            served.commit(0, {MIXED[1]: (5.0, 6.0)}, gone=[MIXED[0]])
            held.wait_for(lambda held: held.versions[0].number == 2, DEADLINE_S)
            found = held.look_up(TABLE, [KEYS[0], KEYS[1]])
            assert found.present.tolist() == [False, True]
            assert found.rows[1].tolist() == [5.0, 6.0]

    def test_it_outlives_its_server_and_goes_on_from_its_version(self, served: Job) -> None:
        port = int(served.ports.address.rpartition(":")[2])
        with ps.subscribe(served.ports.address) as held:
            served.stop()
            held.wait_for(lambda held: bool(held.problem), DEADLINE_S)
            assert held.rows(TABLE, [KEYS[0]]).tolist() == [[1.0, 2.0]]
            served.commit(0, {MIXED[1]: (5.0, 6.0)})
            served.serve(port)
            held.wait_for(lambda held: held.versions[0].number == 2 and not held.problem, DEADLINE_S)
            assert held.rows(TABLE, [KEYS[1]]).tolist() == [[5.0, 6.0]]

    def test_a_server_with_an_older_version_is_told_and_not_followed(self, served: Job) -> None:
        port = int(served.ports.address.rpartition(":")[2])
        older = dict(served.store.contents)
        served.commit(0, {MIXED[1]: (5.0, 6.0)})
        with ps.subscribe(served.ports.address) as held:
            held.wait_for(lambda held: held.versions[0].number == 2, DEADLINE_S)
            served.stop()
            held.wait_for(lambda held: bool(held.problem), DEADLINE_S)
            served.store.contents = older
            served.serve(port)
            held.wait_for(lambda held: "older than what is held" in held.problem, DEADLINE_S)
            assert held.rows(TABLE, [KEYS[1]]).tolist() == [[5.0, 6.0]]
            assert held.versions[0].number == 2

    def test_it_has_only_what_it_asked_for(self, served: Job) -> None:
        with ps.subscribe(served.ports.address, tables=[], variables=["dense/bias"]) as held:
            assert held.variable("dense/bias").shape == (5,)
            with pytest.raises(UnknownVariable, match="variable 'dense/weight' is none of"):
                held.variable("dense/weight")

    @pytest.mark.parametrize(
        ("asked", "told"),
        [
            ({"tables": ["usr"]}, "ps.subscribe: tables: found 'usr'; the run has user"),
            ({"variables": ["bias"]}, "variables: found 'bias'; the run has dense/bias, dense/weight"),
            ({"tables": "user"}, "tables: found 'user'; allowed: a list of names"),
        ],
    )
    def test_mistakes_are_one_sentence(self, served: Job, asked: dict, told: str) -> None:
        with pytest.raises(ConfigurationError, match=told):
            ps.subscribe(served.ports.address, **asked)

    def test_a_server_that_is_not_there(self) -> None:
        with pytest.raises(Unreachable):
            ps.subscribe("127.0.0.1:1", timeout_s=0.0)
        with pytest.raises(ConfigurationError, match="takes the host:port"):
            ps.subscribe("here")
