"""A store in a bucket: what the libraries below it do and say, and what that becomes."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import pytest
from fsspec.exceptions import FSTimeoutError

from parashard.errors import AlreadyStored, ConfigurationError, NotStored, StoreFailed
from parashard.store import open_store, remote
from parashard.store.remote import (
    CALL_DEADLINE_S,
    CONNECT_TIMEOUT_S,
    CREATE_ATTEMPTS_MAX,
    READ_TIMEOUT_S,
    REQUEST_ATTEMPTS_MAX,
    ObjectStore,
)

botocore = pytest.importorskip("botocore.exceptions", reason="NO TEST OF S3: s3fs is not installed (the s3 extra)")


class FakeFiles:
    """An asynchronous fsspec file system that answers each call with the next of its answers, and notes the call."""

    async_impl = True

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def answered(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            answer = self.answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return answered


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FakeFiles:
    fake = FakeFiles()
    monkeypatch.setattr(remote.fsspec, "filesystem", lambda scheme, **options: fake)
    return fake


@pytest.fixture
def object_store(files: FakeFiles) -> ObjectStore:
    return ObjectStore("s3://bucket/run/")


def refused(code: str) -> OSError:
    """Return the error of s3fs for an answer of the server that it does not know better."""
    error = OSError(22, "the server's words")
    error.__cause__ = botocore.ClientError({"Error": {"Code": code}}, "PutObject")
    return error


# --- errors ---


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (PermissionError("Access Denied"), "Access Denied"),
        (refused("SlowDown"), "the server's words"),
        (botocore.EndpointConnectionError(endpoint_url="http://host"), "Could not connect to the endpoint URL"),
        (FSTimeoutError(), "FSTimeoutError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_the_libraries_raise_is_reported_with_the_place_and_the_cause(object_store, files, error, cause):
    for doing, call in (
        ("create a/b", lambda: object_store.create("a/b", b"1")),
        ("replace a/b", lambda: object_store.replace("a/b", b"1")),
        ("look up a/b", lambda: object_store.read("a/b", 1)),
        ("look up a/b", lambda: object_store.size("a/b")),
        ("list a", lambda: object_store.names("a")),
        ("list the store", lambda: object_store.folders("")),
        ("delete a/b", lambda: object_store.delete("a/b")),
    ):
        files.answers = [error]
        with pytest.raises(StoreFailed, match=f"^s3://bucket/run: cannot {doing}: .*{cause}") as raised:
            call()
        assert type(raised.value) is StoreFailed
        assert files.answers == []


@pytest.mark.parametrize("error", [FileExistsError(), refused("PreconditionFailed"), refused("412")], ids=repr)
def test_servers_say_in_several_ways_that_a_name_is_taken(object_store, files, error):  # P3
    files.answers = [error]
    with pytest.raises(AlreadyStored, match="a/b is stored already"):
        object_store.create("a/b", b"1")


def test_a_create_that_met_another_is_sent_again(object_store, files, virtual_time):  # P3
    files.answers = [refused("ConditionalRequestConflict"), refused("409"), FileExistsError()]
    with pytest.raises(AlreadyStored):
        object_store.create("a/b", b"1")
    assert len(virtual_time.pauses_s) == 2
    assert {(call, options["mode"]) for call, _, options in files.calls} == {("pipe_file", "create")}


def test_but_not_for_ever(object_store, files, virtual_time):
    files.answers = [refused("409")] * CREATE_ATTEMPTS_MAX
    with pytest.raises(StoreFailed, match=r"cannot create a/b: .*the server's words"):
        object_store.create("a/b", b"1")
    assert files.answers == []


def test_a_content_that_grows_after_its_size_was_asked_is_not_read_over_the_limit(object_store, files):
    files.answers = [{"type": "file", "size": 3}, b"12345"]
    with pytest.raises(StoreFailed, match="more than 4 bytes"):
        object_store.read("a/b", 4)
    assert files.calls[-1][2]["end"] == 5


def test_a_content_that_goes_after_its_size_was_asked_is_not_stored(object_store, files):
    files.answers = [{"type": "file", "size": 3}, FileNotFoundError()]
    with pytest.raises(NotStored):
        object_store.read("a/b", 4)


# --- deadlines and settings ---


def test_every_call_has_a_deadline(object_store, files):
    files.answers = [None, None, {"type": "file", "size": 1}, b"1", [], None]
    object_store.create("a", b"1")
    object_store.replace("a", b"1")
    object_store.read("a", 1)
    object_store.names("")
    object_store.delete("a")
    assert [options["timeout"] for _, _, options in files.calls] == [CALL_DEADLINE_S] * 6


def test_s3_waits_are_bounded_and_nothing_is_remembered(monkeypatch):
    asked: dict[str, Any] = {}
    monkeypatch.setattr(remote.fsspec, "filesystem", lambda scheme, **options: asked.update(options) or FakeFiles())
    ObjectStore("s3://bucket")
    assert asked == {
        "use_listings_cache": False,
        "skip_instance_cache": True,
        "config_kwargs": {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"total_max_attempts": REQUEST_ATTEMPTS_MAX, "mode": "standard"},
        },
    }


@pytest.mark.parametrize(("url", "package", "extra"), [("s3://b", "s3fs", "s3"), ("gs://b", "gcsfs", "gcs")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, url, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    known_to_fsspec = importlib.import_module("fsspec.registry")._registry
    monkeypatch.delitem(known_to_fsspec, url.partition(":")[0], raising=False)
    with pytest.raises(ConfigurationError, match=rf"{package} is not installed: pip install '.*\[{extra}\]'"):
        open_store(url)


# --- on a real server ---


def test_what_is_not_ours_is_not_listed(s3_url):
    store = ObjectStore(s3_url)
    store.create("plans/0001.json", b"1")
    for other in ("", ".hidden", "a b", "ä", "a b/c"):  # "" is the empty object that consoles make for a folder
        store._files.pipe_file(f"{s3_url}/plans/{other}", b"")
    assert (store.names("plans"), store.folders("plans")) == (["0001.json"], [])


def test_a_content_of_many_parts_is_created_once_too(s3_url, monkeypatch):  # P3
    store = ObjectStore(s3_url)
    part_bytes = 5 * 2**20
    monkeypatch.setattr(store._files, "pipe_file", functools.partial(store._files.pipe_file, chunksize=part_bytes))
    content = bytes(2 * part_bytes + 1)
    store.create("large", memoryview(content))
    assert store._files.info(f"{s3_url}/large")["ETag"].endswith('-3"')
    with pytest.raises(AlreadyStored):
        store.create("large", b"1" + content)
    assert store.read("large", len(content)) == content


def test_a_bucket_that_is_not_there_takes_nothing(s3_url):
    store = ObjectStore("s3://no-such-bucket/run")
    with pytest.raises(StoreFailed, match=r"cannot create run\.json: The specified bucket does not exist") as raised:
        store.create("run.json", b"")
    assert type(raised.value) is StoreFailed
