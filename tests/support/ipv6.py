"""Marks the tests that listen on ::1: a machine, or a container, may be without IPv6."""

from __future__ import annotations

import socket

import pytest


def _is_there() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _is_there(), reason="this machine has no ::1 to listen on")
