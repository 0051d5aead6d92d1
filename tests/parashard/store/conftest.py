"""A store of every kind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from parashard.store import Store, buckets, open_store
from parashard.store.local import LocalStore
from support.azurite import ACCOUNT, KEY, azurite
from support.bucket_servers import gcs, gcs_key, serving

CONTAINER = "checkpoints"


@pytest.fixture
def memory_url() -> Iterator[str]:
    """Return the URL of an empty store in memory."""
    pytest.importorskip("obstore", reason="NO TEST OF OBJECT STORES: obstore is not installed (pip install '.[s3]')")
    yield "memory://test"
    buckets._memory.clear()


@pytest.fixture
def gs_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of an empty store on a server of ours that answers as Google Cloud Storage says it does."""
    pytest.importorskip("obstore", reason="NO TEST OF GCS: obstore is not installed (pip install '.[gcs]')")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(gcs()) as endpoint:
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", gcs_key(endpoint))
        yield "gs://bucket/run"


@pytest.fixture(scope="session")
def az_endpoint() -> Iterator[str]:
    """Serve Azure's blobs on this host until the tests end."""
    with azurite(CONTAINER) as endpoint:
        yield endpoint


@pytest.fixture
def az_url(az_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty folder in Azurite."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{az_endpoint}/{ACCOUNT}")
    return f"az://{CONTAINER}/{tmp_path.parent.name}-{tmp_path.name}"


@pytest.fixture
def local_store(tmp_path: Path) -> LocalStore:
    """Return an empty store in a folder that is not there yet."""
    return LocalStore(tmp_path / "store")


@pytest.fixture(
    params=[
        "local",
        "memory",
        "s3",
        "gs",
        pytest.param(
            "az", marks=pytest.mark.skipif(not shutil.which("azurite-blob"), reason="needs azurite: NOT CHECKED")
        ),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return an empty store; a test that takes it runs once for each kind."""
    if request.param == "local":
        return open_store(str(tmp_path / "made" / "when needed"))
    return open_store(request.getfixturevalue(f"{request.param}_url"))
