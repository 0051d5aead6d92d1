"""Runs a module as `python -m` does, in a network whose names are in a file: HOSTS.json MODULE ARGUMENT...

Stands for a cluster's name service, which a test has not. What is checked against a name, such as a certificate, is
checked against it all the same. A name that is not in the file is not there.
"""

from __future__ import annotations

import ipaddress
import json
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import grpc


def install(hosts: dict[str, str]) -> None:
    """Have names found there, by Python's sockets and by gRPC."""
    find, channel = socket.getaddrinfo, grpc.secure_channel

    def address(host: str) -> str:
        if host in hosts:
            return hosts[host]
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            raise socket.gaierror(socket.EAI_NONAME, f"{host} is not known") from None

    def getaddrinfo(host: str, *more: Any, **options: Any) -> Any:
        return find(address(host), *more, **options)

    def secure_channel(target: str, credentials: Any, options: Any = None) -> grpc.Channel:
        host, _, port = target.rpartition(":")
        named = [*(options or ()), ("grpc.default_authority", target)]  # the name that the certificate is checked for
        return channel(f"ipv4:{address(host)}:{port}", credentials, named)

    socket.getaddrinfo = getaddrinfo
    grpc.secure_channel = secure_channel


if __name__ == "__main__":
    hosts_file, module, *sys.argv[1:] = sys.argv[1:]
    install(json.loads(Path(hosts_file).read_text()))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
