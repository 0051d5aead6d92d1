"""What a machine says of itself: a container within its limits, and a store that is written and cleared."""

from __future__ import annotations

import pytest

from parashard.doctor.facts import Machine
from parashard.doctor.machine import forget, machine, memory, shared, unseen
from parashard.frozen_model import validated

MEMINFO = "MemTotal:        8000000 kB\nMemFree:          100 kB\nMemAvailable:    6000000 kB\n"


def test_a_machine_travels_as_json():
    found = machine()
    assert validated(Machine, found.plain()) == found
    assert found.cores >= 1
    assert 0 < found.memory_free_bytes <= found.memory_bytes


def test_no_variable_of_a_proxy_but_those_that_are_set(monkeypatch):
    for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("grpc_proxy", "")
    assert {"http_proxy", "HTTPS_PROXY", "all_proxy"} <= set(machine().proxies)
    assert "grpc_proxy" not in machine().proxies


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (8_000_000 * 1024, 6_000_000 * 1024)),
        ({"memory.max": "max\n", "memory.current": "5\n"}, (8_000_000 * 1024, 6_000_000 * 1024)),
        ({"memory.max": "1000\n", "memory.current": "400\n"}, (1000, 600)),
        ({"memory/memory.limit_in_bytes": "1000\n", "memory/memory.usage_in_bytes": "1400\n"}, (1000, 0)),
        (
            {
                "memory.max": "1000\n",
                "memory.current": "990\n",
                "memory.stat": "inactive_file_x 1\nanon 90\ninactive_file 700\nactive_file 200\n",
            },
            (1000, 710),
        ),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "990\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 700\n",
            },
            (1000, 710),
        ),
    ],
)
def test_memory_is_what_the_container_may_have(tmp_path, files, expected):
    (tmp_path / "meminfo").write_text(MEMINFO)
    groups = tmp_path / "groups"
    (groups / "memory").mkdir(parents=True)
    for name, text in files.items():
        (groups / name).write_text(text)
    assert memory(tmp_path, groups) == expected


def test_a_store_is_written_and_cleared(tmp_path):
    url = str(tmp_path / "store")
    found = shared(url, "a")
    assert (found.problem, found.write_s > 0) == ("", True)
    assert unseen(url, ["a", "b"]) == ["b"]
    forget(url, "a")
    assert unseen(url, ["a"]) == ["a"]
    (tmp_path / "file").touch()
    assert shared(str(tmp_path / "file" / "x"), "a").problem
    assert shared("ftp://x", "a").problem
