"""Which servers a shard has is the job's choice; what cannot be had is said at the start."""

import time
from types import SimpleNamespace

import pytest
from in_process import WEIGHT_AND_BIAS, plan_of, shard_of
from ipv6 import needs_ipv6

from parashard.errors import ConfigurationError, Unavailable
from parashard.transports.dialling import dial
from ps_server.data_ports import DataPorts
from ps_server.owner import Owner
from ps_server.served import Served


def ports_of(transport: str, port: int = 0, host: str = "127.0.0.1") -> DataPorts:
    """Return the ports of a shard whose weights are private."""
    served = Served(shard_of(plan_of(WEIGHT_AND_BIAS)), Owner(1), "")
    job = SimpleNamespace(
        cluster=SimpleNamespace(transport=transport, queue_bytes=1 << 20),
        optimizer=SimpleNamespace(delay_compensation=0.0),
    )
    return DataPorts(None, served, job, host, port)  # type: ignore[arg-type]


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


def test_a_port_that_somebody_has_may_be_free_later():
    ports = ports_of("tcp")
    try:
        with pytest.raises(Unavailable, match=r"cannot listen on 127\.0\.0\.1"):
            ports_of("tcp", int(ports.address.rpartition(":")[2]))
    finally:
        ports.stop()
