"""The garbage collector around a service's imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys, weakref
{before}
from parashard.process.imports import imported

class Cycle:
    def __init__(self):
        self.itself = self

import statistics
assert not gc.isenabled()
loaded = len(gc.get_objects())
runs = []
gc.callbacks.append(lambda phase, info: runs.append(phase))
imported()
assert not runs and len(gc.get_objects()) < loaded / 10  # none of the modules' objects is looked at
made = weakref.ref(Cycle())
kept = [[] for _ in range(10_000)]  # collects, where that is on
print("freed" if made() is None else "kept", gc.isenabled())
gc.collect()
assert made() is None
"""


@pytest.mark.parametrize(("before", "told"), [("", "freed True"), ("gc.disable()", "kept False")])
def test_garbage_is_collected_after_the_imports_if_it_was_before(before: str, told: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(before=before)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == told
