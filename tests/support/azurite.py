"""Azurite, which serves Azure's blobs on this host: a process with one empty container."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate

from support.waiting import eventually

ACCOUNT = "devstoreaccount1"
KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own, public
)


@contextmanager
def azurite(container: str) -> Iterator[str]:
    """Give the endpoint of a server that has the container."""
    program = shutil.which("azurite-blob")
    assert program, "tests ask before"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    process = subprocess.Popen([*command, "--skipApiVersionCheck", "--disableTelemetry"], stdout=subprocess.DEVNULL)
    try:
        endpoint = f"http://127.0.0.1:{port}"
        eventually(lambda: _created(endpoint, container), "a container in Azurite")
        yield endpoint
    finally:
        process.kill()
        process.wait()


def _created(endpoint: str, container: str) -> bool:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed += f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(
        f"{endpoint}/{ACCOUNT}/{container}?restype=container", headers=headers, method="PUT"
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        direct.open(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read()) from error
    except OSError:
        return False
    return True
