"""Files that survive a power cut: what is flushed, in which order, and what a disk that fails leaves behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from parashard.process.durable import rename_durably, replace_durably, sync_upwards, write_durably


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is flushed and named, in order."""
    found: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        found.append(f"fsync {os.readlink(f'/proc/self/fd/{descriptor}')}")
        fsync(descriptor)

    def named(source: Path, target: Path) -> None:
        found.append(f"name {target}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", named)
    return found


def test_the_content_is_on_the_disk_before_its_name_and_the_name_before_it_returns(
    tmp_path: Path, done: list[str]
) -> None:
    path = tmp_path / "report.json"
    for content in (b"old", b"new"):
        done.clear()
        write_durably(path, content)
        assert done == [f"fsync {path}.tmp", f"name {path}", f"fsync {tmp_path}"]
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"new", [path])


def test_another_name_is_on_the_disk_too(tmp_path: Path, done: list[str]) -> None:
    new, name = tmp_path / "job.new.toml", tmp_path / "job.toml"
    new.write_text("x")
    rename_durably(new, name)
    assert done == [f"name {name}", f"fsync {tmp_path}"]


def test_every_folder_above_is_flushed_that_may_just_have_been_made(tmp_path: Path, done: list[str]) -> None:
    folder = tmp_path / "runs" / "ledger-1"
    folder.mkdir(parents=True)
    sync_upwards(folder)
    assert done[:3] == [f"fsync {folder}", f"fsync {folder.parent}", f"fsync {tmp_path}"]


def test_a_full_disk_keeps_the_old_file_and_nothing_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(temporary: Path) -> None:
        temporary.write_text("ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_durably(path, full)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])
