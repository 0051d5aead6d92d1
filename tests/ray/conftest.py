"""A real Ray for the tests of this folder; without the package they are skipped, and say so.

The tests share three nodes; one that takes a node away brings another in its place.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

import pytest
from ray_nodes import RayNodes

from support.starter_conformance import CHILDREN

MISSING = "NO TEST OF RAY: ray is not installed; `make test-ray` has an environment with it"


@pytest.fixture(scope="session")
def ray() -> None:
    """Skip what needs Ray where there is none."""
    found = importlib.util.find_spec("ray")
    if found is None or found.origin is None:  # this folder has its name
        pytest.skip(MISSING)


@pytest.fixture(scope="session")
def nodes(ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """Return three nodes, which end with the tests; their processes find the children that tests start."""
    children = tmp_path_factory.mktemp("children")
    shutil.copy(CHILDREN / "starter_child.py", children)
    up = RayNodes(3, PYTHONPATH=str(children))
    yield up
    up.down()
