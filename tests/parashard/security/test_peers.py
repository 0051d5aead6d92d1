"""Who counts as one peer."""

import pytest

from parashard.security.peers import host_in_grpc, peer_of_certificate, peer_of_host


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("2001:db8:0:0:ffff::1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
    ],
)
def test_a_host_is_its_address_or_its_network(host, peer):
    assert peer_of_host(host) == peer


@pytest.mark.parametrize(
    ("uris", "peer"),
    [
        (["parashard://worker/worker-0"], "worker/worker-0"),
        (["spiffe://else/where", "parashard://operator/me", "parashard://worker/w"], "operator/me"),
        (["spiffe://else/where"], ""),
        ([], ""),
    ],
)
def test_a_certificate_is_its_first_identity(uris, peer):
    assert peer_of_certificate(uris) == peer


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("ipv4:192.0.2.1:5000", "192.0.2.1"),
        ("ipv6:%5B2001:db8::1%5D:5000", "2001:db8::1"),
        ("ipv6:[::1]:5000", "::1"),
        ("unix:/tmp/socket", ""),
        ("", ""),
    ],
)
def test_grpc_names_a_host(name, host):
    assert host_in_grpc(name) == host
