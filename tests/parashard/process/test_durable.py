"""Files that survive a power cut: what is flushed, in which order, and what a disk that fails leaves behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.errors import NotReady, StoreFailed
from parashard.process.durable import (
    DISK_RETRY_S_MAX,
    rename_durably,
    replace_durably,
    retry_while_disk_fails,
    sync_upwards,
    write_durably,
)
from parashard.process.shell import ExitCode, exit_code_of
from parashard.store.claims import claim_incarnation
from parashard.store.local import LocalStore


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


class Pauses(threading.Event):
    """Never waits; remembers for how long it was to."""

    def __init__(self, gives_up_after: int = 1000) -> None:
        super().__init__()
        self.s: list[float | None] = []
        self.gives_up_after = gives_up_after

    def wait(self, timeout: float | None = None) -> bool:
        self.s.append(timeout)
        return len(self.s) >= self.gives_up_after


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [times]

    def write() -> str:
        if left[0]:
            left[0] -= 1
            raise error
        return "written"

    return write


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_it_is_tried_with_growing_pauses_until_there_is_room() -> None:
    pauses = Pauses()
    assert retry_while_disk_fails(failing(4, FULL), "claims", pauses) == "written"
    assert pauses.s == [1.0, 2.0, 4.0, 8.0]


def test_after_a_minute_it_says_why_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends with that reason, which people see, and is started again."""
    pauses = Pauses()
    with pytest.raises(OSError, match="No space left") as raised:
        retry_while_disk_fails(failing(1000, FULL), "claims", pauses)
    assert DISK_RETRY_S_MAX <= sum(s for s in pauses.s if s) < 2 * DISK_RETRY_S_MAX
    store_failed = StoreFailed("claims: no space left on device")
    store_failed.__cause__ = raised.value
    assert exit_code_of(store_failed) == ExitCode.IO_ERROR


def test_a_claim_waits_for_the_disk_of_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, pauses = LocalStore(tmp_path), Pauses()
    monkeypatch.setattr("parashard.store.local.os.write", lambda *_: (_ for _ in ()).throw(FULL))

    def room_again(timeout: float | None = None) -> bool:
        monkeypatch.undo()
        return False

    pauses.wait = room_again  # type: ignore[method-assign]
    assert retry_while_disk_fails(lambda: claim_incarnation(store, "shard-0"), "claims", pauses) == 1


def test_a_process_that_is_asked_to_end_stops_waiting() -> None:
    with pytest.raises(NotReady, match="claims cannot be written: no space left on device"):
        retry_while_disk_fails(failing(9, FULL), "claims", Pauses(gives_up_after=2))


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), StoreFailed("s3://b: access denied")])
def test_a_permanent_error_is_raised_at_once(error: Exception) -> None:
    pauses = Pauses()
    with pytest.raises(type(error)):
        retry_while_disk_fails(failing(1, error), "claims", pauses)
    assert pauses.s == []
