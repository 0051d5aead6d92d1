"""A change of the authority as SECURITY.md says it, command by command: at no moment is a connection refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parashard.cli.main import app
from parashard.errors import Unreachable
from parashard.protocol import rpc
from parashard.protocol.rpc import our_errors
from parashard.security.credentials import LOOK_S, Credentials
from parashard.security.identity import PULL, PUSH
from parashard.transports.stream import Stream, greet
from support.fake_plane import GREETING
from support.stream_cases import DEADLINE_S, echo, serving, soon
from support.unary_handlers import raw_handlers

ROLES = ("shard", "worker")


def certs(*arguments: object) -> None:
    result = CliRunner().invoke(app, ["certs", *map(str, arguments)])
    assert result.exit_code == 0, result.output


class Running:
    """A shard that listens on both planes and a worker, each with a folder of its own; the test moves their clocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._now_s = 0.0
        certs("init", folder / "old")
        for role in ROLES:
            self.issue("old", role)
        self.shard, self.worker = (Credentials(folder / role, clock=lambda: self._now_s) for role in ROLES)
        self.server = rpc.Server("127.0.0.1:0", self.shard)
        handlers = raw_handlers("parashard.v1.ShardData", {"Push": lambda request, context: b"pushed"})
        self.server.grpc.add_generic_rpc_handlers((handlers,))
        self.server.start()
        self._streams = serving(echo, tls=self.shard.server_context, calls=(PUSH, PULL))
        self._stream: Callable[[], Stream] = self._streams.__enter__()[1]
        self._lasting = rpc.connect(self.server.address, self.worker)

    def issue(self, authority: str, role: str, *options: str) -> None:
        certs("issue", self.folder / authority, self.folder / role, "--role", role, *options)

    def connect(self) -> None:
        """Call on the channel that lasts, on a new one, and on a new stream."""
        self._now_s += LOOK_S
        self.call(self._lasting)
        with closing(rpc.connect(self.server.address, self.worker)) as channel:
            self.call(channel)
        self.open_stream(self.worker)

    def call(self, channel) -> None:
        with our_errors("shard:1"):
            assert channel.unary_unary(PUSH)(b"", timeout=DEADLINE_S) == b"pushed"

    def open_stream(self, credentials: Credentials) -> None:
        plain, context = self._stream()._connection, credentials.client_context()
        with closing(Stream(plain, "shard:1", tls=context, server_name="127.0.0.1")) as stream:
            assert greet(stream, GREETING, deadline_s=soon())

    def close(self) -> None:
        self._lasting.close()
        self.server.stop(0.0)
        self._streams.__exit__(None, None, None)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.close()


@pytest.mark.parametrize("order", [ROLES, ROLES[::-1]], ids="-".join)
def test_the_authority_changes_and_no_peer_is_refused(running, order):
    folder = running.folder
    shutil.copytree(folder / "worker", folder / "left-behind")
    running.connect()
    certs("init", folder / "new")
    for role in order:
        with (folder / role / "ca.pem").open("ab") as file:  # cat new/ca.pem >> ROLE/ca.pem
            file.write((folder / "new" / "ca.pem").read_bytes())
        running.connect()
    for role in order:
        running.issue("new", role, "--keep-ca")
        running.connect()
    for role in order:
        running.issue("new", role)
        running.connect()
    assert all((folder / role / "ca.pem").read_bytes() == (folder / "new" / "ca.pem").read_bytes() for role in ROLES)
    left_behind = Credentials(folder / "left-behind")  # still trusts the old authority alone
    with pytest.raises(Unreachable), closing(rpc.connect(running.server.address, left_behind)) as channel:
        running.call(channel)
    with pytest.raises(Unreachable):
        running.open_stream(left_behind)
