"""Which servers a shard has is the job's choice, and who may use them the table's; what cannot be had is said."""

import time
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

from parashard.errors import ConfigurationError, NotAllowed, Unavailable
from parashard.protocol.messages import Buffers
from parashard.security import identity
from parashard.security.credentials import Credentials
from parashard.security.identity import ALLOWED, PULL, PUSH, Role
from parashard.transports.base import ShardAddress
from parashard.transports.tcp import TcpTransport, dial
from parashard_server.push_memory import PushMemory
from parashard_server.serving.listeners import Listeners
from parashard_server.shard_host import AdmissionLock, ShardHost
from support.certificates import Certificates
from support.fake_plane import GREETING, FakePlane
from support.in_process import WEIGHT_AND_BIAS, plan_of, shard_of
from support.ipv6 import needs_ipv6
from support.stream_cases import DEADLINE_S
from support.tcp_cases import pull_of, push_of, ramp


def ports_of(
    transport: str,
    port: int = 0,
    host: str = "127.0.0.1",
    *,
    plane: FakePlane | None = None,
    credentials: Credentials | None = None,
) -> Listeners:
    """Return the ports of a shard whose weights are private."""
    served = ShardHost(shard_of(plan_of(WEIGHT_AND_BIAS)), AdmissionLock(1), "")
    job = SimpleNamespace(cluster=SimpleNamespace(transport=transport, workers=1))
    plane = plane or FakePlane([0, ELEMENTS])
    return Listeners(plane, served, job, PushMemory(1 << 20), host, port, credentials)  # type: ignore[arg-type]


def test_grpc_alone_needs_no_port():
    ports = ports_of("grpc")
    assert (ports.address, ports.local_path) == ("", "")
    ports.stop()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_tcp_listens_on_a_port_of_its_own(transport):
    ports = ports_of(transport)
    try:
        assert int(ports.address.rpartition(":")[2]) > 0
        assert ports.local_path == "", "its weights are not shared"
    finally:
        ports.stop()


@needs_ipv6
def test_tcp_listens_on_an_ipv6_address():
    ports = ports_of("tcp", host="::1")
    try:
        assert ports.address.startswith("[::1]:")
        dial("::1", int(ports.address.rpartition(":")[2]), time.monotonic() + 10.0).close()
    finally:
        ports.stop()


def test_a_job_that_allows_only_shared_memory_does_not_start_without():
    with pytest.raises(ConfigurationError, match=r'transport = "shm".*share no memory'):
        ports_of("shm")


def test_a_port_in_use_may_be_free_later():
    ports = ports_of("tcp")
    try:
        with pytest.raises(Unavailable, match=r"cannot listen on 127\.0\.0\.1"):
            ports_of("tcp", int(ports.address.rpartition(":")[2]))
    finally:
        ports.stop()


ELEMENTS = 5


class TestWhoMayUseTheTcpPort:
    """Is what the table says of pushes and of pulls, of the server that the shard itself puts together."""

    @pytest.mark.parametrize("role", Role)
    def test_are_the_roles_of_the_table(self, certificates, role):
        plane = FakePlane([0, ELEMENTS])
        if role in ALLOWED[PUSH] & ALLOWED[PULL]:
            push_and_pull(plane, certificates, role)
            assert np.array_equal(plane.memory.weights, ramp(ELEMENTS))
        else:
            with pytest.raises(NotAllowed, match=f"certificate's roles are {role}/{role}-0; allowed: worker"):
                push_and_pull(plane, certificates, role)
            assert plane.version == 0

    @pytest.mark.parametrize("call", [PUSH, PULL])
    def test_is_no_role_with_only_one_of_these_rights(self, certificates, call, monkeypatch):
        monkeypatch.setattr(identity, "ALLOWED", MappingProxyType({**ALLOWED, call: frozenset()}))
        with pytest.raises(NotAllowed, match=f"{call[1:]}: .*; allowed: none"):
            push_and_pull(FakePlane([0, ELEMENTS]), certificates, Role.WORKER)


def push_and_pull(plane: FakePlane, certificates: Certificates, role: Role) -> None:
    """Push to a shard's ports as a role, then pull what it has."""
    ports = ports_of("tcp", plane=plane, credentials=certificates.of(Role.SHARD))
    address = ShardAddress("", 7, data_address=ports.address)
    transport = TcpTransport(address, GREETING, tls=certificates.of(role).client_context)
    ports.start()
    try:
        assert transport.push(push_of(ramp(ELEMENTS)), DEADLINE_S).result().version == 1
        pulled = Buffers([np.zeros(ELEMENTS, "<f4")])
        assert transport.pull(pull_of(4 * ELEMENTS), pulled, DEADLINE_S).result().version == 1
    finally:
        transport.close()
        ports.stop()
