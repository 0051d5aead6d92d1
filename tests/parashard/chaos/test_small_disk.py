"""A small file system: filled to its last byte, given back, and no other one touched."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from parashard.chaos import proxied_cluster
from parashard.chaos.proxied_cluster import SmallDisk, check_small
from parashard.errors import ConfigurationError
from support.small_mount import NotPermitted, mounted


@pytest.fixture
def small() -> Iterator[Path]:
    """Return a folder on a file system of 1 MiB."""
    try:
        with mounted(size_mib=1) as folder:
            yield folder
    except NotPermitted as error:
        pytest.skip(str(error))


def test_it_is_filled_to_its_last_byte_and_given_back(small: Path) -> None:
    check_small(small)
    disk = SmallDisk(small)
    (small / "job.toml").write_text("kept")
    for name in ("one", "two"):
        disk.fill()
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (small / name).write_text("x" * 4096)
        disk.free()
        disk.free()
        (small / name).write_text("x" * 4096)
    assert (small / "job.toml").read_text() == "kept"


def test_a_large_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxied_cluster, "SMALL_BYTES_MAX", 1 << 20)
    with pytest.raises(ConfigurationError, match=r"at most 1 MiB, such as mount -t tmpfs"):
        check_small(tmp_path)


def test_no_more_than_the_bound_is_ever_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxied_cluster, "SMALL_BYTES_MAX", 3 << 20)
    SmallDisk(tmp_path).fill()
    assert (tmp_path / proxied_cluster.FILLER_FILE).stat().st_size == 3 << 20
