"""A service whose address is gone from this machine ends, to be started again where it can be reached."""

import errno
import socket
import threading

import pytest

from parashard.process.own_address import GONE_S, LOOK_S, has_address, stop_without_address, watch_address
from parashard.process.shell import ExitCode, Stop
from support.ipv6 import needs_ipv6

LOOKS = int(GONE_S / LOOK_S)


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_machine_has_its_own_address(address):
    assert has_address(address)


@pytest.mark.parametrize("address", ["203.0.113.7", pytest.param("2001:db8::7", marks=needs_ipv6)])
def test_a_machine_does_not_have_another_s(address):
    assert not has_address(address)


def test_a_process_without_a_descriptor_left_has_its_address_still(monkeypatch):
    def no_socket(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_socket)
    assert has_address("203.0.113.7")


def test_a_service_whose_address_is_gone_stops_with_the_code_of_another_try():
    stop = Stop()
    stop_without_address("203.0.113.7", stop, look_s=0.0)
    assert (stop.reason, stop.exit_code) == (
        "this machine does not have the address 203.0.113.7 any more",
        ExitCode.RETRY,
    )


def test_an_address_that_comes_back_in_time_stops_nothing():
    stop, looks = Stop(), iter([False] * (LOOKS - 1) + [True] + [False] * (LOOKS - 1) + [True])

    def has(address: str) -> bool:
        found = next(looks, None)
        if found is None:
            stop.ask("the test is over")
        return bool(found)

    stop_without_address("203.0.113.7", stop, has=has, look_s=0.0)
    assert (stop.reason, stop.exit_code) == ("the test is over", ExitCode.DONE)


def test_a_stop_that_was_asked_for_before_keeps_its_exit_code():
    stop = Stop()
    stop.ask("SIGTERM")
    stop.ask("later", ExitCode.RETRY)
    assert (stop.reason, stop.exit_code) == ("SIGTERM", ExitCode.DONE)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_is_not_watched(host):
    before = threading.active_count()
    watch_address(host, Stop())
    assert threading.active_count() == before
