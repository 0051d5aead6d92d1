"""The authorization matrix: every RPC x every role x every kind of certificate, on a real server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from parashard._proto import coordinator_pb2, serving_pb2, shard_pb2
from parashard.errors import NotAllowed, Unreachable
from parashard.protocol import rpc
from parashard.protocol.rpc import our_errors
from parashard.security.identity import ALLOWED, Role
from parashard.transports.grpc import SERVICE
from support.certificates import BAD, NONE, RIGHT, Certificates
from support.unary_handlers import raw_handlers
from support.waiting import DEADLINE_S

S, W, C, O = Role.SHARD, Role.WORKER, Role.COORDINATOR, Role.OPERATOR  # noqa: E741
V, R = Role.SERVER, Role.READER

# Written down a second time on purpose: to change who may call what is to change it here too.
MATRIX = {
    "parashard.v1.Coordinator/GetJob": {S, W, O, V},
    "parashard.v1.Coordinator/RegisterShard": {S},
    "parashard.v1.Coordinator/RegisterWorker": {W},
    "parashard.v1.Coordinator/GetView": {W, V},
    "parashard.v1.Coordinator/Lease": {W},
    "parashard.v1.Coordinator/GetStatus": {O},
    "parashard.v1.Coordinator/Scale": {O},
    "parashard.v1.Coordinator/Supervise": {O},
    "parashard.v1.Coordinator/CreateCheckpoint": {O},
    "parashard.v1.Coordinator/Follow": {O},
    "parashard.v1.Shard/Inspect": {C, O},
    "parashard.v1.Shard/TakeCheckpoint": {C},
    "parashard.v1.Shard/Rollback": {C},
    "parashard.v1.Shard/Read": {V},
    "parashard.v1.ShardData/Push": {W},
    "parashard.v1.ShardData/Pull": {W},
    "parashard.v1.Serving/GetServed": {R},
    "parashard.v1.Serving/GetRows": {R},
    "parashard.v1.Serving/GetVariable": {R},
    "parashard.v1.Serving/Subscribe": {R},
    "grpc.health.v1.Health/Check": {S, W, C, O, V, R},
    "grpc.health.v1.Health/List": set(),
    "grpc.health.v1.Health/Watch": set(),
}
CONTRACTS = (coordinator_pb2, shard_pb2, serving_pb2, health_pb2)


def methods_of(contract: Any) -> dict[str, list[str]]:
    """Return the methods of every service of a contract."""
    services = contract.DESCRIPTOR.services_by_name.values()
    return {service.full_name: [method.name for method in service.methods] for service in services}


SERVICES = {name: methods for contract in CONTRACTS for name, methods in methods_of(contract).items()}
SERVICES[SERVICE] = ["Push", "Pull"]  # of bytes, so in no contract


class Guarded:
    """A server that answers every RPC there is, and a channel to it for every certificate."""

    def __init__(self, certificates: Certificates) -> None:
        self.certificates = certificates
        self.answered: list[str] = []
        self.server = rpc.Server("127.0.0.1:0", certificates.of(C))
        for service, methods in SERVICES.items():
            if not service.startswith("grpc."):  # which every server of ours has
                handlers = {method: self._answer(f"{service}/{method}") for method in methods}
                self.server.grpc.add_generic_rpc_handlers((raw_handlers(service, handlers),))
        self.server.start()
        self._channels: dict[tuple[Role, str], grpc.Channel] = {}

    def _answer(self, method: str) -> Any:
        def answer(request: bytes, context: Any) -> bytes:
            self.answered.append(method)
            return b""

        return answer

    def call(self, method: str, role: Role, kind: str) -> None:
        channel = self._channels.get((role, kind)) or self._channels.setdefault((role, kind), self._channel(role, kind))
        with our_errors(self.server.address):
            channel.unary_unary(f"/{method}")(b"", timeout=DEADLINE_S)

    def _channel(self, role: Role, kind: str) -> grpc.Channel:
        folder = self.certificates.folder(role, RIGHT if kind == NONE else kind)
        files = [(folder / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem")]
        ours = grpc.ssl_channel_credentials(files[0]) if kind == NONE else grpc.ssl_channel_credentials(*files)
        return grpc.secure_channel(self.server.address, ours)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self.server.stop(0.0)


@pytest.fixture(scope="module")
def guarded(certificates: Certificates) -> Iterator[Guarded]:
    guarded = Guarded(certificates)
    yield guarded
    guarded.close()


def test_the_matrix_has_every_rpc_there_is_and_so_has_the_table():
    existing = {f"{service}/{method}" for service, methods in SERVICES.items() for method in methods}
    assert set(MATRIX) == existing
    assert {method.removeprefix("/"): set(roles) for method, roles in ALLOWED.items()} == MATRIX


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("method", MATRIX)
def test_a_right_certificate_calls_exactly_what_its_role_may(guarded, method, role):
    guarded.answered.clear()
    if role in MATRIX[method]:
        guarded.call(method, role, RIGHT)
        assert guarded.answered == ([] if method.startswith("grpc.") else [method])
    else:
        with pytest.raises(NotAllowed, match=f"{method}: the certificate's roles are {role}/{role}-0; allowed: "):
            guarded.call(method, role, RIGHT)
        assert guarded.answered == []


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("role", Role)
def test_any_other_certificate_calls_nothing(guarded, role, kind):  # TLS refuses it before any method is named
    method = next(method for method, roles in MATRIX.items() if role in roles and not method.startswith("grpc."))
    guarded.answered.clear()
    with pytest.raises(Unreachable, match="a missing certificate, or one that the other side refuses"):
        guarded.call(method, role, kind)
    assert guarded.answered == []


def test_without_tls_nothing_is_answered(guarded):
    with rpc.connect(guarded.server.address) as channel, pytest.raises(Unreachable), our_errors("it"):
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=DEADLINE_S)


def test_a_certificate_with_several_roles_may_do_what_any_of_them_may(guarded, certificates):
    channel = rpc.connect(guarded.server.address, certificates.of(W, O))
    for method in ("parashard.v1.Coordinator/Lease", "parashard.v1.Coordinator/Scale"):
        channel.unary_unary(f"/{method}")(b"", timeout=DEADLINE_S)
    with (
        pytest.raises(NotAllowed, match="roles are worker/worker-0, operator/operator-0; allowed: shard"),
        our_errors(guarded.server.address),
    ):
        channel.unary_unary("/parashard.v1.Coordinator/RegisterShard")(b"", timeout=DEADLINE_S)
    channel.close()


def test_a_worker_cannot_pose_as_a_server(certificates):
    server = rpc.Server("127.0.0.1:0", certificates.of(W))
    server.start()
    channel = rpc.connect(server.address, certificates.of(W))
    with (
        pytest.raises(Unreachable, match="no TLS with the server"),
        our_errors(server.address),
    ):
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=DEADLINE_S)
    channel.close()
    server.stop(0.0)
