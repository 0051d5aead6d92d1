"""What every store promises, on each kind of store: a local folder, memory, and servers of S3, GCS and Azure."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parashard.errors import AlreadyStored, ConfigurationError, NotStored, StoreFailed
from parashard.store import Store, open_store
from parashard.store.base import NAME_CHARACTERS_MAX, SEGMENT_CHARACTERS_MAX

NAME = "shards/p0001/s0000/manifest.json"

HOSTILE = [
    "",
    "/",
    "/etc/passwd",
    "..",
    "../run.json",
    "plans/../../run.json",
    "plans/./0001.json",
    "plans//0001.json",
    "plans/",
    ".hidden",
    "plans/.0001.json",
    "run\n",
    "run.json\0",
    "a b",
    "a\\b",
    "a:b",
    "s3://bucket/a",
    "a?versionId=1",
    "a*",
    "ä",
    "~",
    "a" * (SEGMENT_CHARACTERS_MAX + 1),
    "a/" * (NAME_CHARACTERS_MAX // 2) + "a",
]


@pytest.mark.parametrize("content", [b"", b"\0", b"content\n", bytes(range(256)) * 1000])
def test_what_was_created_is_read(store: Store, content: bytes):
    store.create(NAME, content)
    assert store.read(NAME, len(content)) == content
    assert store.size(NAME) == len(content)


def test_a_content_may_be_a_view_of_any_items(store: Store):
    store.create(NAME, memoryview(bytes(range(8))).cast("H")[1:])
    assert store.read(NAME, 6) == bytes(range(2, 8))


def test_a_name_is_created_once(store: Store):  # P3
    store.create(NAME, b"first")
    with pytest.raises(AlreadyStored, match=NAME):
        store.create(NAME, b"second")
    assert store.read(NAME, 100) == b"first"


def test_a_replaced_content_is_the_new_one_and_may_be_the_first(store: Store):
    for content in (b"a long first content", b"second", b""):
        store.replace(NAME, content)
        assert store.read(NAME, 100) == content
    assert store.names("shards/p0001/s0000") == ["manifest.json"]


def test_what_is_not_there_is_not_stored(store: Store):
    store.create(NAME, b"1")
    for name in ("other", "shards", "shards/p0001", f"{NAME}/below", f"{NAME}.json"):
        with pytest.raises(NotStored, match=name):
            store.read(name, 100)
        with pytest.raises(NotStored, match=name):
            store.size(name)
        store.delete(name)
    assert store.read(NAME, 100) == b"1"


def test_a_content_over_the_limit_is_not_read(store: Store):
    store.create(NAME, b"12345")
    with pytest.raises(StoreFailed, match=r"manifest\.json has 5 bytes, allowed are 4"):
        store.read(NAME, 4)
    with pytest.raises(StoreFailed, match="allowed are 0"):
        store.read(NAME, 0)


def test_a_folder_lists_what_is_directly_in_it_sorted(store: Store):
    for name in ("run.json", "plans/0002.json", "plans/0001.json", "shards/p0001/s0001/x", "shards/p0001/s0000/x"):
        store.create(name, b"")
    assert (store.names(""), store.folders("")) == (["run.json"], ["plans", "shards"])
    assert (store.names("plans"), store.folders("plans")) == (["0001.json", "0002.json"], [])
    assert (store.names("shards/p0001"), store.folders("shards/p0001")) == ([], ["s0000", "s0001"])


def test_a_folder_that_is_not_there_or_is_a_file_is_empty(store: Store):
    assert (store.names(""), store.folders("")) == ([], [])
    store.create("plans/0001.json", b"")
    for folder in ("plan", "plans/0001", "plans/0001.json", "plans/0001.json/below"):
        assert (store.names(folder), store.folders(folder)) == ([], [])


def test_what_another_process_does_is_seen_at_once(store: Store):
    other = open_store(store.url)
    assert store.names("plans") == []
    other.create("plans/0001.json", b"1")
    assert store.names("plans") == ["0001.json"]
    other.replace("plans/0001.json", b"22")
    assert (store.size("plans/0001.json"), store.read("plans/0001.json", 2)) == (2, b"22")
    other.delete("plans/0001.json")
    assert store.names("plans") == []
    with pytest.raises(NotStored):
        store.read("plans/0001.json", 2)


def test_a_deleted_name_is_free_and_an_emptied_folder_is_gone(store: Store):
    store.create("plans/0001.json", b"1")
    store.create("plans/0002.json", b"2")
    store.delete("plans/0001.json")
    store.delete("plans/0001.json")
    assert (store.names("plans"), store.folders("")) == (["0002.json"], ["plans"])
    store.delete("plans/0002.json")
    assert store.folders("") == []
    store.create("plans/0001.json", b"again")
    assert store.read("plans/0001.json", 100) == b"again"


# Not with the servers of the tests: that one of many wins is the server's own promise.
@pytest.mark.parametrize("store", ["local", "memory"], indirect=True)
def test_of_many_that_create_a_name_at_once_one_succeeds(store: Store):  # P3
    def claimed(claimant: int) -> list[int]:
        won = []
        for number in range(20):
            try:
                store.create(f"claims/{number}", str(claimant).encode())
            except AlreadyStored:
                continue
            won.append(number)
        return won

    with ThreadPoolExecutor(6) as threads:
        won = list(threads.map(claimed, range(6)))
    assert sorted(number for numbers in won for number in numbers) == list(range(20))
    for claimant, numbers in enumerate(won):
        assert all(store.read(f"claims/{number}", 1) == str(claimant).encode() for number in numbers)


@pytest.mark.parametrize("store", ["local", "memory"], indirect=True)
@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name[:20]))
def test_hostile_names_are_refused_by_every_method(store: Store, name: str):
    for refused in (
        lambda: store.create(name, b""),
        lambda: store.replace(name, b""),
        lambda: store.read(name, 1),
        lambda: store.size(name),
        lambda: store.delete(name),
        lambda: store.local_path(name),
        lambda: store.names(name or "/"),
        lambda: store.folders(name or "/"),
    ):
        with pytest.raises(ConfigurationError, match="store name"):
            refused()


def test_only_a_local_store_has_files(tmp_path: Path, memory_url: str):
    local = open_store(f"file://{tmp_path}")
    local.create(NAME, b"1")
    assert local.local_path(NAME) == tmp_path / NAME
    assert (tmp_path / NAME).read_bytes() == b"1"
    assert open_store(memory_url).local_path(NAME) is None


# --- opening ---


def test_a_path_and_a_file_url_are_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for url in ("checkpoints", str(tmp_path / "checkpoints"), f"file://{tmp_path}/checkpoints"):
        assert open_store(url).url == str(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file://relative/path", "needs an absolute path"),
        (
            "http://host/folder",
            "http:// is not a store we take; allowed are a path, file://, az://, gs://, memory://, s3://",
        ),
        ("simplecache::s3://bucket/folder", "simplecache::s3:// is not a store we take"),
        ("memory://", "names no bucket"),
        ("s3:///", "names no bucket"),
    ],
)
def test_a_url_that_is_no_store_is_refused_with_what_is_allowed(url: str, problem: str):
    with pytest.raises(ConfigurationError, match=problem):
        open_store(url)
