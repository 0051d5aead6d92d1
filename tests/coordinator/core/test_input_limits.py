"""Texts of peers: names and addresses that are none are refused, what is for people is cut and made readable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ConfigurationError, LimitExceeded, MalformedFrame
from parashard_coordinator.core.input_limits import (
    ADDRESS_BYTES_MAX,
    METRICS_MAX,
    NAME_BYTES_MAX,
    checked_address,
    checked_name,
    checked_text,
    fault_of_metrics,
    readable,
)

UNSEEN = [
    "a\nb",
    "a\x1b[2Jb",
    "a\x00b",
    "a\u202eb",
    "a\u2028b",
]  # a line, a terminal's order, and what turns text round


@pytest.mark.parametrize("name", ["", "worker-0", "guest-12", "gpu7.rack-2.example", "host:9", "team/a@b", "w" * 100])
def test_names_of_hosts_pods_and_paths_are_names(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize("name", [*UNSEEN, "<script>", "[red]", "-x", "a b", "a=b", "\u0430"])
def test_what_a_log_or_a_terminal_takes_for_more_is_no_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match="letters, digits") as caught:
        checked_name(name)
    assert str(caught.value).isprintable()


def test_a_name_has_a_bound() -> None:
    with pytest.raises(ConfigurationError, match=f"at most {NAME_BYTES_MAX} characters, found {NAME_BYTES_MAX + 1}"):
        checked_name("w" * (NAME_BYTES_MAX + 1))


@pytest.mark.parametrize("address", ["", "127.0.0.1:80", "[::1]:80", "[fe80::1%eth0]:9", "shard_0.example:7"])
def test_addresses(address: str) -> None:
    assert checked_address(address, "address") == address


@pytest.mark.parametrize("address", [*UNSEEN, "a b:1", "<b>:1", "h:1/path"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(MalformedFrame, match=r"http_address: '.*' is not host:port") as caught:
        checked_address(address, "http_address")
    assert str(caught.value).isprintable()


def test_an_address_has_a_bound() -> None:
    checked_address("h" * ADDRESS_BYTES_MAX, "address")
    with pytest.raises(LimitExceeded, match="address has 301 bytes; allowed are 300"):
        checked_address("h" * (ADDRESS_BYTES_MAX + 1), "address")


def test_what_must_stay_as_it_is_is_not_cut_but_refused() -> None:
    assert checked_text("/dev/shm/a b", "local_path", 12) == "/dev/shm/a b"
    with pytest.raises(LimitExceeded, match="local_path has 14 bytes; allowed are 13"):
        checked_text("\u00e4" * 7, "local_path", 13)
    for text in UNSEEN:
        with pytest.raises(MalformedFrame, match="cannot be printed") as caught:
            checked_text(text, "fingerprint", 100)
        assert str(caught.value).isprintable()


def test_a_short_text_of_printed_characters_stays_as_it_is() -> None:
    assert readable("cuda:0 NVIDIA H200, ä, 火", 40) == "cuda:0 NVIDIA H200, ä, 火"


@pytest.mark.parametrize("text", UNSEEN)
def test_what_is_not_seen_is_spelt_out(text: str) -> None:
    assert readable(text, 100).isprintable()
    assert "\\" in readable(text, 100)


@given(st.text(max_size=30), st.integers(3, 20))
def test_a_readable_text_is_within_its_bound_and_reads_the_same_again(text: str, bytes_max: int) -> None:
    shown = readable(text, bytes_max)
    assert shown.isprintable()
    assert len(shown.encode()) <= bytes_max
    assert readable(shown, bytes_max) == shown
    assert shown == text or shown.endswith("...") or not text.isprintable()


def test_metrics_are_few_and_have_names_that_can_be_shown() -> None:
    assert fault_of_metrics({"accuracy": 0.5, "top 5": 0.9}) == ""
    assert "at most 64 metrics, found 65" in fault_of_metrics({str(i): 0.0 for i in range(METRICS_MAX + 1)})
    assert "found" not in fault_of_metrics({str(i): 0.0 for i in range(METRICS_MAX)})
    for name in [*UNSEEN, "x" * 101]:
        fault = fault_of_metrics({name: 1.0})
        assert "a metric's name" in fault
        assert fault.isprintable()
