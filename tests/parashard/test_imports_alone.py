"""Every public name can be the first one that a script asks for: no import depends on what was imported before."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

import parashard

DEADLINE_S = 100.0
FRAMEWORKS = {"parashard.jax": "jax", "parashard.keras": "keras", "parashard.torch": "torch"}

EACH_IN_A_FORK = """
import importlib, json, os, sys, traceback
import numpy  # shared by all, so that a fork has little to import

failed = {}
for module in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            importlib.import_module(module)
        except BaseException:
            os.write(writing, traceback.format_exc()[-2000:].encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        if trouble := said.read():
            failed[module] = trouble
    os.waitpid(child, 0)
print(json.dumps(failed))
"""


def public_modules() -> list[str]:
    """Those of the public names, and what frameworks' modules import of ours before their framework."""
    places = {*parashard._PLACES.values(), "parashard.models.sequential", "parashard.models.row_places"}
    return sorted(place for place in places if place not in FRAMEWORKS or find_spec(FRAMEWORKS[place]) is not None)


@pytest.mark.full("a process for each module; import-linter finds circles")
def test_every_public_module_can_be_the_first_import():
    ran = subprocess.run(
        [sys.executable, "-c", EACH_IN_A_FORK, json.dumps(public_modules())],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert json.loads(ran.stdout) == {}
