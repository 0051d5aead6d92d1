"""Ports in a row that are free, for tests of fixed ports and of ranges."""

from __future__ import annotations

import os
import socket


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """Return the first of so many ports in a row that are free, below those that the system gives out."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    def free(port: int) -> bool:
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                return False
            return True

    begin = 20000 + os.getpid() % 1000 * 10
    return next(port for port in range(begin, 32000) if all(free(port + more) for more in range(count)))
