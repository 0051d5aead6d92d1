"""keep_freed_memory: arrays of the same size are made of the same memory, and large ones of a shard are not kept."""

import subprocess
import sys

import pytest

from parashard.process.resources import OWN_SETTINGS
from support.command_run import ROOT

PROGRAM = """
import resource, sys
import numpy as np
from parashard.process.resources import EVERY_STEP, MESSAGES, keep_freed_memory
kept = {"steps": EVERY_STEP, "messages": MESSAGES}.get(sys.argv[1])
print(kept is not None and keep_freed_memory(kept))
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for mib in (1, 4, 32):
    for _ in range(3):
        np.zeros(mib << 20, np.uint8)[::4096] = 1
    before = faults()
    for _ in range(8):
        np.full(mib << 20, 1, np.uint8)
    print(mib, faults() - before)
"""


def faults_of(kept: str, **variables: str) -> tuple[bool, dict[int, int]]:
    """Return whether anything was set, and by size in MiB the page faults of eight arrays."""
    words = [sys.executable, "-c", PROGRAM, kept]
    environment = {"PYTHONPATH": str(ROOT), "NUMPY_MADVISE_HUGEPAGE": "0", **variables}
    lines = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.split("\n")
    return lines[0] == "True", {int(mib): int(count) for mib, count in (line.split() for line in lines[1:-1])}


@pytest.fixture(scope="module")
def untouched() -> dict[int, int]:
    """The faults where nothing is set: large arrays are given back and faulted in again."""
    done, found = faults_of("")
    assert not done
    if found[32] < 8:
        pytest.skip("this C library keeps what is freed by itself")
    return found


def test_a_workers_arrays_cost_no_faults_once_they_were_made(untouched: dict[int, int]) -> None:
    done, found = faults_of("steps")
    assert done
    assert max(found.values()) < untouched[32] / 8


def test_a_shard_keeps_what_messages_are_made_of_and_returns_a_snapshot(untouched: dict[int, int]) -> None:
    done, found = faults_of("messages")
    assert done
    assert max(found[1], found[4]) < untouched[32] / 8
    assert found[32] > untouched[32] / 2


@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_a_setting_of_the_users_stays(name: str, untouched: dict[int, int]) -> None:
    value = "glibc.malloc.trim_threshold=131072" if name == "GLIBC_TUNABLES" else "131072"
    assert faults_of("steps", **{name: value})[0] is False
