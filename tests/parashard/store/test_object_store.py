"""A store in a bucket: what obstore does and says, against a real server whose answers are spoiled."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from parashard.errors import AlreadyStored, ConfigurationError, NotStored, StoreFailed
from parashard.store import buckets, open_store, remote
from parashard.store.buckets import Bucket
from parashard.store.claims import Claims, newest_claim
from parashard.store.remote import CREATE_ATTEMPTS_MAX, ObjectStore
from support.bucket_servers import Proxy, serving, spoiling

pytest.importorskip("obstore", reason="NO TEST OF OBJECT STORES: obstore is not installed (pip install '.[s3]')")


@pytest.fixture
def server(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Proxy]]:
    """Return a proxy before the S3 server, which all clients of the test find."""
    proxy = spoiling(os.environ["AWS_ENDPOINT_URL"])
    with serving(proxy) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield proxy
        proxy.released.set()


@pytest.fixture
def object_store(server: type[Proxy], s3_url: str) -> ObjectStore:
    return ObjectStore(s3_url)


def every_call(store: ObjectStore) -> dict[str, Any]:
    return {
        "create a/b": lambda: store.create("a/b", b"1"),
        "replace a/b": lambda: store.replace("a/b", b"1"),
        "read a/b": lambda: store.read("a/b", 1),
        "look up a/b": lambda: store.size("a/b"),
        "list a": lambda: store.names("a"),
        "list the store": lambda: store.folders(""),
        "delete a/b": lambda: store.delete("a/b"),
    }


# --- errors ---


def test_a_refused_request_is_reported_with_the_place_and_the_server_s_words(object_store, server):
    for doing, call in every_call(object_store).items():
        server.faults[:] = [(403, "AccessDenied")]
        with pytest.raises(StoreFailed, match=f"^{object_store.url}: cannot {doing}: ") as raised:
            call()
        assert type(raised.value) is StoreFailed
        assert "the server's words" in raised.value.message or doing.startswith("look up")  # HEAD has no body
        assert server.faults == []


def test_a_busy_server_is_asked_again(object_store, server):
    for doing, call in every_call(object_store).items():
        server.faults[:] = [(503, "SlowDown")]
        with suppress(NotStored):
            call()
        assert server.faults == [], doing


def test_a_server_that_is_not_there_is_named_with_the_reason(s3_url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(buckets, "RETRIES_MAX", 0)
    for doing, call in every_call(ObjectStore(s3_url)).items():
        with pytest.raises(StoreFailed, match=rf"cannot {doing}: .*127\.0\.0\.1:1.*\(connection refused\)$"):
            call()


def test_a_bucket_that_is_not_there_takes_nothing_and_has_no_list(s3_url):
    store = ObjectStore("s3://no-such-bucket/run")
    for call in (lambda: store.create("run.json", b""), lambda: store.names("")):
        with pytest.raises(StoreFailed, match=r"cannot .*: The specified bucket does not exist$") as raised:
            call()
        assert type(raised.value) is StoreFailed


@pytest.mark.parametrize(
    ("url", "told", "cause"),
    [
        (
            "s3://b",
            "HTTP error: error sending request\n\nDebug source: InvalidCertificate(",
            r"\(its certificate is not trust",
        ),
        ("s3://b", "PUT http://169.254.169.254/latest", "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET"),
        ("gs://b", "GET http://metadata.google.internal/", "no credentials: set GOOGLE_APPLICATION_CREDENTIALS, or"),
        ("s3://b", "Received redirect without LOCATION", "in another region: set AWS_DEFAULT_REGION"),
    ],
)
def test_what_the_environment_has_to_set_is_named(s3_url, url, told, cause):
    def fail() -> None:
        raise OSError(told)

    with pytest.raises(StoreFailed, match=cause):
        Bucket(url).call("look", fail)


# --- creates ---


def test_a_create_whose_reply_was_lost_may_find_its_own_content(object_store, server):  # P3
    server.faults[:] = ["lose"]
    with pytest.raises(AlreadyStored, match="a/b is stored already"):
        object_store.create("a/b", b"mine")
    assert server.faults == []
    assert object_store.read("a/b", 10) == b"mine"


def test_a_claim_whose_reply_was_lost_is_its_maker_s(object_store, server):  # P23
    mine = Claims(object_store, "shard-0", "mine")
    server.faults[:] = ["pass", "lose"]  # the list of claims, then the claim
    assert mine.next() == 1
    assert server.faults == []
    mine.check()


def test_a_claim_none_of_whose_replies_came_does_not_supersede_its_process(object_store, server):  # P23
    mine = Claims(object_store, "shard-0", "mine")
    assert mine.next() == 1
    server.faults[:] = ["pass", "pass", *["lose"] * (buckets.RETRIES_MAX + 1)]  # two lists, then the claim
    with pytest.raises(StoreFailed, match=r"cannot create claims/shard-0/00000002"):
        mine.next()
    assert server.faults == []
    assert newest_claim(object_store, "shard-0") == 2
    mine.check()
    other = Claims(object_store, "shard-0", "other")
    assert other.next() == 3


def test_a_create_that_met_another_is_sent_again(object_store, server, virtual_time):  # P3
    server.faults[:] = [(409, "ConditionalRequestConflict"), "pass", (409, "ConditionalRequestConflict")]
    object_store.create("a/b", b"1")
    assert len(virtual_time.pauses_s) == 2
    assert server.seen == ["PUT", "HEAD"] * 2 + ["PUT"]
    assert object_store.read("a/b", 1) == b"1"


def test_but_not_for_ever(object_store, server, virtual_time):
    server.faults[:] = [(409, "ConditionalRequestConflict"), "pass"] * CREATE_ATTEMPTS_MAX
    with pytest.raises(StoreFailed, match=r"cannot create a/b: other requests for it are under way") as raised:
        object_store.create("a/b", b"1")
    assert type(raised.value) is StoreFailed
    assert server.faults == []


def test_a_large_content_is_created_once_too_and_replaced_in_parts(s3_url, monkeypatch):  # P3
    monkeypatch.setattr(remote, "PART_BYTES", 5 << 20)
    store = ObjectStore(s3_url)
    content = bytes(remote.SMALL_BYTES + 1)
    store.create("large", memoryview(content))
    with pytest.raises(AlreadyStored):
        store.create("large", b"1" + content)
    store.replace("parts", content)
    assert store._bucket.requests.head(store._path("parts"))["e_tag"].endswith('-4"')
    for name in ("large", "parts"):
        assert store.read(name, len(content)) == content


def test_a_content_that_goes_before_it_is_read_is_not_stored(object_store):
    object_store.create("a/b", b"123")
    assert object_store.size("a/b") == 3
    object_store.delete("a/b")
    with pytest.raises(NotStored):
        object_store.read("a/b", 4)


# --- deadlines ---


def test_a_server_that_never_answers_is_given_up(server, s3_url, monkeypatch):
    monkeypatch.setattr(buckets, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(buckets, "RETRIES_MAX", 1)
    store = ObjectStore(s3_url)
    for doing, call in every_call(store).items():
        once = doing.startswith(("create", "delete"))  # which are not sent again
        server.faults[:] = ["hang"] * (1 if once else 2)
        with pytest.raises(StoreFailed, match=rf"cannot {doing}: .*\(timed out\)$"):
            call()
        assert server.faults == []


def test_large_creates_have_a_client_with_a_longer_time_limit(memory_url, monkeypatch):
    monkeypatch.setattr(remote, "SMALL_BYTES", 3)
    store, uploads = ObjectStore(memory_url), ObjectStore("memory://uploads")
    store._bucket.uploads = uploads._bucket.requests
    for name in ("123", "1234"):
        store.create(name, name.encode())
    assert (store.names(""), uploads.names("")) == (["123"], ["1234"])
    assert buckets.REQUEST_TIMEOUT_S > buckets.READ_TIMEOUT_S


def test_a_large_create_that_is_not_answered_is_given_up(server, s3_url, monkeypatch):
    monkeypatch.setattr(buckets, "REQUEST_TIMEOUT_S", 0.05)
    monkeypatch.setattr(remote, "SMALL_BYTES", 0)
    store = ObjectStore(s3_url)
    server.faults[:] = ["hang"]
    with pytest.raises(StoreFailed, match=r"cannot create a/b: .*\(timed out\)$"):
        store.create("a/b", b"1")
    assert server.faults == []


def test_requests_end_before_the_call_that_waits_for_them():
    first = buckets.RETRIED_FOR_S + max(buckets.REQUEST_TIMEOUT_S, buckets.READ_TIMEOUT_S)
    assert first < buckets.CALL_DEADLINE_S


def test_a_call_is_not_waited_for_longer_than_its_deadline(memory_url, monkeypatch):
    monkeypatch.setattr(buckets, "CALL_DEADLINE_S", 0.05)
    never = threading.Event()
    with pytest.raises(StoreFailed, match=r"^memory://test: cannot look: no answer within 0 s$"):
        Bucket(memory_url).call("look", never.wait, 30)
    never.set()


def test_a_signal_is_handled_while_the_server_is_waited_for(memory_url):
    handled = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    try:

        def wait() -> bool:
            os.kill(os.getpid(), signal.SIGUSR1)
            return handled.wait(30)

        assert Bucket(memory_url).call("look", wait)
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- opening, and what is not ours ---


@pytest.mark.parametrize(("url", "extra"), [("s3://b", "s3"), ("gs://b", "gcs"), ("az://b", "azure")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, url, extra):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigurationError, match=rf"obstore is not installed: pip install '.*\[{extra}\]'"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "variables", "complaint"),
    [
        ("az://b", {}, "^az://b: .*[Aa]ccount"),
        ("gs://b", {"GOOGLE_SERVICE_ACCOUNT_KEY": "{"}, "^gs://b: "),
        ("s3://b", {"AWS_CA_BUNDLE": "/no/such/file"}, "AWS_CA_BUNDLE: /no/such/file cannot be read"),
        ("s3://b", {"AWS_PROFILE": "nobody"}, "AWS_PROFILE: found nobody"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_at_once(s3_url, monkeypatch, url, variables, complaint):
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=complaint):
        open_store(url)


def test_what_is_not_ours_is_not_listed(s3_url):
    store = ObjectStore(s3_url)
    store.create("plans/0001.json", b"1")
    for other in (".hidden", "a b", "ä", "a b/c"):
        store._bucket.requests.put(f"{store._bucket.folder}/plans/{other}", b"")
    assert (store.names("plans"), store.folders("plans")) == (["0001.json"], [])


def test_a_folder_of_any_name_has_the_keys_that_it_says(s3_url):
    store = ObjectStore(f"{s3_url}/my runs/ä+1")
    store.create("plans/0001.json", b"1")
    listed = Bucket(s3_url).requests.list_with_delimiter(f"{store._bucket.folder}/plans")["objects"]
    assert [entry["path"] for entry in listed] == [f"{store.url.removeprefix('s3://checkpoints/')}/plans/0001.json"]
    assert store.names("plans") == ["0001.json"]
