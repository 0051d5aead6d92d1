"""New certificates while calls are under way: the next connection has them, and no call is lost."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509

from parashard.errors import ParashardError
from parashard.protocol import rpc
from parashard.protocol.rpc import our_errors
from parashard.security.credentials import LOOK_S, Credentials
from parashard.security.identity import PULL, PUSH, Role
from support.certificates import Certificates
from support.unary_handlers import raw_handlers
from support.waiting import DEADLINE_S


class Folder:
    """The credentials of one process, whose clock the test moves."""

    def __init__(self, certificates: Certificates, role: Role, folder: Path) -> None:
        self._certificates, self._role = certificates, role
        self.path = Path(shutil.copytree(certificates.folder(role), folder))
        self._now_s = 0.0
        self.credentials = Credentials(self.path, clock=lambda: self._now_s)

    @property
    def serial(self) -> int:
        return x509.load_pem_x509_certificate((self.path / "cert.pem").read_bytes()).serial_number

    def renew(self) -> None:
        self._certificates.renew(self.path, [self._role])
        self._now_s += LOOK_S


class Cluster:
    """A shard that remembers the certificates of who pushes, and a worker's channel to it."""

    def __init__(self, certificates: Certificates, folder: Path) -> None:
        self.shard, self.worker = (Folder(certificates, role, folder / role) for role in (Role.SHARD, Role.WORKER))
        self.server = rpc.Server("127.0.0.1:0", self.shard.credentials)
        self.seen: list[int] = []
        self.let_go, self.pulling = threading.Event(), threading.Event()
        handlers = raw_handlers("parashard.v1.ShardData", {"Push": self._push, "Pull": self._pull})
        self.server.grpc.add_generic_rpc_handlers((handlers,))
        self.server.start()
        self.channel = rpc.connect(self.server.address, self.worker.credentials)
        self.push = self.channel.unary_unary(PUSH)
        self.pull = self.channel.unary_unary(PULL)

    def _push(self, frame: bytes, context) -> bytes:
        (content,) = context.auth_context()["x509_pem_cert"]
        self.seen.append(x509.load_pem_x509_certificate(content).serial_number)
        return frame

    def _pull(self, frame: bytes, context) -> bytes:
        self.pulling.set()
        assert self.let_go.wait(DEADLINE_S)
        return frame

    def pushed_with(self) -> int:
        """Push, and return which certificate the shard saw."""
        with our_errors(self.server.address):
            self.push(b"", timeout=DEADLINE_S)
        return self.seen[-1]

    def shown_to_new_connections(self) -> int:
        """Return which certificate the server has in a handshake."""
        host, _, port = self.server.address.rpartition(":")
        context = self.worker.credentials.client_context()
        with (
            socket.create_connection((host, int(port)), DEADLINE_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            content = connection.getpeercert(binary_form=True)
            return x509.load_der_x509_certificate(content or b"").serial_number

    def close(self) -> None:
        self.let_go.set()
        self.channel.close()
        self.server.stop(0.0)


@pytest.fixture
def cluster(certificates: Certificates, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(certificates, tmp_path)
    yield cluster
    cluster.close()


def test_a_worker_pushes_with_its_newest_certificate(cluster):
    first = cluster.worker.serial
    assert cluster.pushed_with() == first
    for _ in range(3):
        cluster.worker.renew()
        assert cluster.pushed_with() == cluster.worker.serial != first


def test_a_server_shows_its_newest_certificate(cluster):
    first = cluster.shown_to_new_connections()
    assert first == cluster.shard.serial
    cluster.shard.renew()
    assert cluster.shown_to_new_connections() == cluster.shard.serial != first


def test_a_call_under_way_is_answered_on_the_connection_that_it_began_on(cluster):
    waiting = cluster.pull.future(b"weights", timeout=DEADLINE_S)
    assert cluster.pulling.wait(DEADLINE_S)
    for _ in range(3):
        cluster.worker.renew()
        cluster.shard.renew()
        assert cluster.pushed_with() == cluster.worker.serial
    assert len(cluster.channel._channels) == 2, "unused ones are closed"
    cluster.let_go.set()
    assert waiting.result() == b"weights"


def test_a_channel_is_closed_after_its_last_call(cluster):
    ended = threading.Event()
    waiting = cluster.pull.future(b"weights", timeout=DEADLINE_S)
    waiting.add_done_callback(lambda _: ended.set())  # called after the channel's own
    old = cluster.channel._channels[0].channel
    cluster.worker.renew()
    cluster.let_go.set()
    assert ended.wait(DEADLINE_S)
    cluster.pushed_with()
    assert len(cluster.channel._channels) == 1
    with pytest.raises(ValueError, match="closed"):
        old.unary_unary(PUSH)(b"", timeout=DEADLINE_S)


def test_a_closed_channel_makes_no_calls(cluster):
    cluster.channel.close()
    with pytest.raises(ValueError, match="closed"):
        cluster.push.future(b"", timeout=DEADLINE_S)
    with pytest.raises(ValueError, match="closed"):
        cluster.push(b"", timeout=DEADLINE_S)


def test_without_a_change_one_connection_carries_everything(cluster):
    cluster.pushed_with()
    (channel,) = cluster.channel._channels
    cluster.pushed_with()
    assert (cluster.channel._channels, channel.calls) == ([channel], 0)


def test_no_push_of_many_is_lost_while_all_certificates_change(cluster):
    failed: list[Exception] = []
    shown: set[int] = set()
    over = threading.Event()

    def push_often() -> None:
        while not over.is_set():
            try:
                cluster.pushed_with()
            except (ParashardError, ValueError) as error:
                failed.append(error)

    threads = [threading.Thread(target=push_often) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        cluster.worker.renew()
        cluster.shard.renew()
        shown.add(cluster.worker.serial)
        cluster.pushed_with()
    over.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert failed == []
    assert shown <= set(cluster.seen)


def test_a_stream_server_and_its_clients_take_the_newest_too(certificates, tmp_path):
    shard, worker = Folder(certificates, Role.SHARD, tmp_path / "s"), Folder(certificates, Role.WORKER, tmp_path / "w")
    seen: set[tuple[int, int]] = set()
    for _ in range(2):
        seen.add(serials_in_a_handshake(shard.credentials.server_context(), worker.credentials.client_context()))
        assert (shard.serial, worker.serial) in seen
        shard.renew()
        worker.renew()
    assert len(seen) == 2


def serials_in_a_handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[int, int]:
    """Return the serial numbers of both certificates, the server's first."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
    ]
    for _ in range(3):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    found = [x509.load_der_x509_certificate(end.getpeercert(binary_form=True) or b"") for end in reversed(ends)]
    return found[0].serial_number, found[1].serial_number
