"""Hosts, ports and addresses as text: read, written, and refused with what is allowed; ranges; interfaces."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from parashard.errors import ConfigurationError, Unavailable
from parashard.process.addresses import (
    Interface,
    PortRange,
    address_on,
    advertised,
    advertised_beside,
    advertised_for,
    checked_host,
    interfaces,
    join_address,
    listed_in,
    listen,
    own_host,
    port_of,
    split_address,
)

FOUND = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.1.0.7"),
    Interface("lo", "::1"),
    Interface("eth0", "fd00::7"),
    Interface("eth0", "fe80::1"),
    Interface("ib0", "fe80::2"),
    Interface("eth1", "fd01::7"),
]


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 7000), ("::1", 65535), ("node-1.example", 1)])
def test_an_address_is_read_back_from_its_text(host, port):
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize("text", ["", "7000", ":7000", "host", "host:", "host:0", "host:65536", "host:-1", "host:٣"])
def test_a_text_that_is_no_address_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"is not HOST:PORT with a port of 1 to 65535"):
        split_address(text)


@pytest.mark.parametrize("text", ["::1:7000", "[::1:7000", "fe80::1]:7000"])
def test_an_ipv6_address_needs_brackets(text):
    with pytest.raises(ConfigurationError, match=r"in brackets, as in \[::1\]:7000"):
        split_address(text)


@pytest.mark.parametrize(
    ("advertise", "whole", "beside"),
    [
        (None, "127.0.0.1:7000", "127.0.0.1:7000"),
        ("node-1", "node-1:7000", "node-1:7000"),
        ("[fd00::1]", "[fd00::1]:7000", "[fd00::1]:7000"),
        ("node-1:9", "node-1:9", "127.0.0.1:7000"),
        ("[fd00::1]:9", "[fd00::1]:9", "127.0.0.1:7000"),
    ],
)
def test_an_advertised_host_stands_for_every_port_and_an_advertised_port_for_its_own(advertise, whole, beside):
    assert advertised_for(advertise and advertised(advertise), "127.0.0.1:7000") == whole
    assert advertised_beside(advertise, "127.0.0.1:7000") == beside


@pytest.mark.parametrize("text", ["", "node-1:", "::1"])
def test_what_cannot_be_advertised_is_refused(text):
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        advertised(text)


@pytest.mark.parametrize("text", ["0.0.0.0", "[::]", "0.0.0.0:7000", "auto", "[fe80::1%eth0]:7000"])
def test_an_address_that_others_cannot_connect_to_is_not_advertised(text):
    with pytest.raises(ConfigurationError, match="allowed: a HOST or HOST:PORT at which others reach this process"):
        advertised(text)


def test_ports_and_ranges():
    assert (port_of("0"), port_of("7000"), port_of("7000-7099")) == (0, 7000, PortRange(7000, 7099))
    assert str(port_of("7000-7099")) == "7000-7099"
    for text in ("-1", "65536", "70000", "seven", "0-7", "7000-65536", "7000-"):
        with pytest.raises(ConfigurationError, match=r"is not a port: allowed are [01] to 65535, or a range"):
            port_of(text)
    with pytest.raises(ConfigurationError, match="7099-7000 is no range of ports"):
        port_of("7099-7000")


def test_of_a_range_the_first_free_port_is_listened_on():
    tried = []

    def on(port: int) -> int:
        tried.append(port)
        if port < 7002:
            raise Unavailable(f"{port} is taken")
        return port

    assert listen(PortRange(7000, 7005), on) == 7002
    assert tried == [7000, 7001, 7002]
    with pytest.raises(Unavailable, match="no port of 7000-7001 is free; of the last: 7001 is taken"):
        listen(PortRange(7000, 7001), on)
    with pytest.raises(Unavailable, match="7000 is taken"):
        listen(7000, on)


@pytest.mark.parametrize(
    ("wanted", "address"),
    [
        ("eth0", "10.1.0.7"),
        ("eth1", "fd01::7"),
        ("lo", "127.0.0.1"),
        ("10.1.0.0/16", "10.1.0.7"),
        ("10.1.0.7/16", "10.1.0.7"),
        ("fd00::/8", "fd00::7"),
    ],
)
def test_an_interface_or_a_network_gives_this_machines_address(wanted, address):
    assert address_on(wanted, FOUND) == address


@pytest.mark.parametrize("wanted", ["ib0", "eth7", "10.2.0.0/16"])
def test_an_interface_without_an_address_is_refused_with_those_that_have_one(wanted):
    with pytest.raises(
        ConfigurationError, match=rf"no address on the interface '{wanted}'; there are: lo \(127.0.0.1\)"
    ):
        address_on(wanted, FOUND)


def test_a_network_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match=r"'10\.1\.0\.0/40' is no network"):
        address_on("10.1.0.0/40", FOUND)


def test_the_kernel_lists_loopback_and_only_addresses():
    found = interfaces()
    if not found:
        pytest.skip("this kernel lists no addresses over netlink")
    assert Interface("lo", "127.0.0.1") in found
    assert all(ipaddress.ip_address(one.address) for one in found)
    assert own_host("interface:lo") == own_host("interface:127.0.0.0/8") == "127.0.0.1"


@pytest.mark.parametrize("answer", [b"", b"\0" * 15, b"\xff" * 40, b"\0" * 4000])
def test_an_answer_that_is_no_list_has_no_addresses(answer):
    assert listed_in(answer)[0] == []


def test_auto_falls_back_to_the_names_ipv6_address(monkeypatch):
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    listed = [(0, 0, 0, "", ("fe80::1", 0, 0, 2)), (0, 0, 0, "", ("fd00::7", 0, 0, 0))]
    monkeypatch.setattr(socket, "gethostname", lambda: "six")
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: listed)
    assert own_host("auto") == "fd00::7"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%eth0", "node-7.cluster", "auto"])
def test_a_host_is_an_address_or_a_name(host):
    assert checked_host(host) == host


@pytest.mark.parametrize(
    "text", ["[::1]", "[::1]:7000", "127.0.0.1:7000", "node:x", "::1]", "10.1.0.0/16", "1:2", "127.1"]
)
def test_brackets_and_a_port_are_no_part_of_a_host(text):
    with pytest.raises(ConfigurationError, match="is no host; allowed: an address or a name without a port, an IPv6"):
        own_host(text)
