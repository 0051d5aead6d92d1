"""A store in a folder: what other processes see at each moment, and after each failure and death of a writer."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from parashard.errors import AlreadyStored, NotStored, StoreFailed
from parashard.store import local
from parashard.store.local import FOLDER_ATTEMPTS_MAX, LocalStore
from support.faulty_os import DyingOs, FailingOs, Killed, WatchedOs

NAME = "plans/0001.json"
OLD = b"old"
NEW = b"the new content"


def files_of(store: LocalStore) -> list[str]:
    """Return every file below the store's folder, temporaries too."""
    return sorted(str(path.relative_to(store.folder)) for path in store.folder.rglob("*") if path.is_file())


def seen(store: LocalStore) -> bytes | None:
    """Return what a reader finds under the name."""
    try:
        content = store.read(NAME, 100)
    except NotStored:
        content = None
    assert store.names("plans") == ([] if content is None else ["0001.json"])
    return content


# --- whole or not at all ---


def looks_during(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, write: Callable[[str, bytes], None]
) -> list[bytes | None]:
    """Write the new content; return what a reader finds before and after each of the write's system calls."""
    looks: list[bytes | None] = []

    def look(call: str) -> None:
        looks.append(seen(store))

    with monkeypatch.context() as patch:
        patch.setattr(local, "os", WatchedOs(look, look))
        write(NAME, NEW)
    return looks


def test_readers_see_nothing_and_then_the_whole_at_every_moment_of_a_create(local_store, monkeypatch):  # P20
    looks = looks_during(local_store, monkeypatch, local_store.create)
    first = looks.index(NEW)
    assert first > 5
    assert set(looks[:first]) == {None}
    assert set(looks[first:]) == {NEW}


def test_readers_see_the_old_and_then_the_new_at_every_moment_of_a_replace(local_store, monkeypatch):  # P20
    local_store.create(NAME, OLD)
    looks = looks_during(local_store, monkeypatch, local_store.replace)
    first = looks.index(NEW)
    assert first > 5
    assert set(looks[:first]) == {OLD}
    assert set(looks[first:]) == {NEW}


@pytest.mark.parametrize(("write", "naming"), [("create", "link"), ("replace", "replace")])
def test_a_content_is_flushed_before_it_has_its_name_and_the_folders_after(local_store, monkeypatch, write, naming):
    calls: list[str] = []
    monkeypatch.setattr(local, "os", WatchedOs(calls.append))
    getattr(local_store, write)(NAME, NEW)
    ordered = [call for call in calls if call in ("write", "fsync", "link", "replace")]
    assert ordered == [
        "write",
        "fsync",
        naming,
        "fsync",
        "fsync",
        "fsync",
    ]  # plans, the store, the folder that holds it


def test_a_write_that_takes_only_a_part_is_continued(local_store, monkeypatch):
    class Stingy(WatchedOs):
        def write(self, descriptor: int, content: memoryview) -> int:
            return os.write(descriptor, content[:4])

    monkeypatch.setattr(local, "os", Stingy(lambda name: None))
    local_store.create(NAME, NEW)
    assert local_store.read(NAME, 100) == NEW


def test_a_reader_of_a_file_that_shrinks_under_it_gets_an_error_and_no_part(local_store, monkeypatch):
    local_store.create(NAME, NEW)

    class Shrinking(WatchedOs):
        def fstat(self, descriptor: int) -> os.stat_result:
            found = os.fstat(descriptor)
            os.truncate(local_store.local_path(NAME), 4)
            return found

    monkeypatch.setattr(local, "os", Shrinking(lambda name: None))
    with pytest.raises(StoreFailed, match="ended after 4 of 15 bytes"):
        local_store.read(NAME, 100)


# --- failures of the disk ---

FAULTS = [
    pytest.param("open", 1, errno.ENOSPC, id="open"),
    pytest.param("write", 1, errno.ENOSPC, id="write: no space"),
    pytest.param("write", 1, errno.EIO, id="write"),
    pytest.param("fsync", 1, errno.EIO, id="fsync"),
    pytest.param("fsync", 1, errno.ENOSPC, id="fsync: no space"),
    pytest.param("fsync", 2, errno.EIO, id="fsync of the folder"),
    pytest.param("fsync", 4, errno.EIO, id="fsync of the folder above"),
    pytest.param("makedirs", 1, errno.EROFS, id="read-only"),
]


@pytest.mark.parametrize(("call", "nth", "number"), [*FAULTS, pytest.param("link", 1, errno.EIO, id="link")])
def test_a_create_that_fails_leaves_nothing_and_can_be_tried_again(local_store, monkeypatch, call, nth, number):
    faulty = FailingOs(call, nth, number)
    with monkeypatch.context() as patch:
        patch.setattr(local, "os", faulty)
        with pytest.raises(StoreFailed) as raised:
            local_store.create(NAME, NEW)
    assert faulty.failed
    assert not isinstance(raised.value, AlreadyStored)
    assert str(raised.value) == f"{local_store.url}: cannot create {NAME}: {os.strerror(number).lower()}"
    assert seen(local_store) is None
    assert not local_store.folder.exists() or files_of(local_store) == []
    local_store.create(NAME, NEW)
    assert seen(local_store) == NEW


@pytest.mark.parametrize(("call", "nth", "number"), [*FAULTS, pytest.param("replace", 1, errno.EIO, id="rename")])
def test_a_replace_that_fails_leaves_the_old_or_the_new_whole(local_store, monkeypatch, call, nth, number):
    local_store.create(NAME, OLD)
    faulty = FailingOs(call, nth, number)
    with monkeypatch.context() as patch:
        patch.setattr(local, "os", faulty)
        with pytest.raises(StoreFailed, match=f"cannot replace {NAME}: {os.strerror(number).lower()}"):
            local_store.replace(NAME, NEW)
    assert faulty.failed
    assert seen(local_store) == (NEW if call == "fsync" and nth > 1 else OLD)
    assert files_of(local_store) == [NAME]


def test_a_delete_that_is_not_durable_is_reported(local_store, monkeypatch):
    local_store.create(NAME, OLD)
    faulty = FailingOs("fsync", 1, errno.EIO)
    monkeypatch.setattr(local, "os", faulty)
    with pytest.raises(StoreFailed, match=f"cannot delete {NAME}: input/output error"):
        local_store.delete(NAME)
    assert faulty.failed


@pytest.mark.parametrize("ask", [lambda s: s.names("plans"), lambda s: s.folders("plans")], ids=["names", "folders"])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(local_store, monkeypatch, ask):
    local_store.create(NAME, OLD)
    faulty = FailingOs("scandir", 1, errno.EIO)
    monkeypatch.setattr(local, "os", faulty)
    with pytest.raises(StoreFailed, match="cannot list plans: input/output error"):
        ask(local_store)
    assert faulty.failed


@pytest.mark.parametrize(
    ("call", "ask"), [("fstat", lambda s: s.read(NAME, 100)), ("stat", lambda s: s.size(NAME))], ids=["read", "size"]
)
def test_a_file_that_cannot_be_read_is_not_an_absent_one(local_store, monkeypatch, call, ask):
    local_store.create(NAME, OLD)
    faulty = FailingOs(call, 1, errno.EIO)
    monkeypatch.setattr(local, "os", faulty)
    with pytest.raises(StoreFailed, match=f"{NAME}: input/output error") as raised:
        ask(local_store)
    assert faulty.failed
    assert not isinstance(raised.value, NotStored)


def test_a_store_below_a_file_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreFailed, match=f"cannot create {NAME}: "):
        LocalStore(tmp_path / "file").create(NAME, NEW)


# --- dead writers ---


@pytest.mark.parametrize("write", ["create", "replace"])
def test_a_writer_that_dies_at_any_call_leaves_nothing_or_the_whole_and_blocks_no_other(
    tmp_path, monkeypatch, write
):  # P20
    left_over = named = 0
    for nth in range(1, 100):
        store = LocalStore(tmp_path / str(nth))
        with monkeypatch.context() as patch:
            patch.setattr(local, "os", DyingOs(nth))
            try:
                getattr(store, write)(NAME, NEW)
                break
            except Killed:
                pass
        found = seen(store)
        assert found in (None, NEW)
        named += found == NEW
        left_over += len(files_of(store)) > (found == NEW)
        if found is None:
            store.create(NAME, b"by the next")
            assert seen(store) == b"by the next"
        else:
            with pytest.raises(AlreadyStored):
                store.create(NAME, b"by the next")
        store.delete(NAME)
        assert seen(store) is None
    else:
        pytest.fail("the writer never got to its end")
    assert left_over >= 2
    assert named >= 3


def test_what_is_not_ours_is_not_listed_and_stays(local_store):
    local_store.create(NAME, OLD)
    others = [".0123456789abcdef", "a b", "note~", "ä"]
    for other in others:
        (local_store.folder / "plans" / other).touch()
        (local_store.folder / (other + " folder")).mkdir()
    assert (local_store.names("plans"), local_store.folders("")) == (["0001.json"], ["plans"])
    local_store.delete(NAME)
    assert files_of(local_store) == sorted(f"plans/{other}" for other in others)


# --- folders that come and go ---


def test_a_folder_that_is_deleted_while_a_file_is_made_in_it_is_made_again(local_store, monkeypatch):
    removals = iter(range(3))

    def remove_folder(call: str) -> None:
        if call == "open" and (local_store.folder / "plans").exists() and next(removals, None) is not None:
            (local_store.folder / "plans").rmdir()

    monkeypatch.setattr(local, "os", WatchedOs(remove_folder))
    local_store.create(NAME, NEW)
    assert next(removals, None) is None
    assert seen(local_store) == NEW


def test_but_not_for_ever(local_store, monkeypatch):
    removed = 0

    def remove_folder(call: str) -> None:
        nonlocal removed
        if call == "open":
            (local_store.folder / "plans").rmdir()
            removed += 1

    monkeypatch.setattr(local, "os", WatchedOs(remove_folder))
    with pytest.raises(StoreFailed, match=f"was removed {FOLDER_ATTEMPTS_MAX} times"):
        local_store.create(NAME, NEW)
    assert removed == FOLDER_ATTEMPTS_MAX


def test_a_delete_does_not_remove_the_store_itself(local_store):
    local_store.create("run.json", NEW)
    local_store.delete("run.json")
    assert local_store.folder.is_dir()
