"""A store of every kind, and the S3 server that one of them talks to."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from parashard.store import Store, open_store

BUCKET = "checkpoints"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Serve S3, with an empty bucket, on a free port of this host until the tests end."""
    pytest.importorskip("s3fs", reason="NO TEST OF S3: s3fs is not installed (pip install parashard[s3])")
    server_module = pytest.importorskip("moto.server", reason="NO TEST OF S3: moto is not installed (the dev extra)")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=10).close()
        yield endpoint
    finally:
        server.stop()


@pytest.fixture
def s3_url(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty folder on the server, and let every S3 client of this test find the server."""
    settings = {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.parent.name}-{tmp_path.name}"


@pytest.fixture
def memory_url() -> Iterator[str]:
    """Return the URL of an empty store in memory."""
    yield "memory://test"
    files = fsspec.filesystem("memory")
    if files.exists("test"):
        files.rm("test", recursive=True)


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return an empty store; a test that takes it runs once for each kind."""
    if request.param == "local":
        return open_store(str(tmp_path / "made" / "when needed"))
    return open_store(request.getfixturevalue(f"{request.param}_url"))
