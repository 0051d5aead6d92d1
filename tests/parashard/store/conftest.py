"""A store of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from parashard.store import Store, open_store
from parashard.store.local import LocalStore


@pytest.fixture
def memory_url() -> Iterator[str]:
    """Return the URL of an empty store in memory."""
    yield "memory://test"
    files = fsspec.filesystem("memory")
    if files.exists("test"):
        files.rm("test", recursive=True)


@pytest.fixture
def local_store(tmp_path: Path) -> LocalStore:
    """Return an empty store in a folder that is not there yet."""
    return LocalStore(tmp_path / "store")


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return an empty store; a test that takes it runs once for each kind."""
    if request.param == "local":
        return open_store(str(tmp_path / "made" / "when needed"))
    return open_store(request.getfixturevalue(f"{request.param}_url"))
