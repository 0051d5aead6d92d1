"""Real containers, where they are asked for and an engine can be had; what a test leaves behind goes with it.

PARASHARD_CONTAINERS=1 (`make test-all` and `make test-containers` set it) asks for them: without it nothing here is
collected, since the first run builds a base image, fetches wheels and takes minutes. `docs/containers.md` says what a
machine needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from composed_job import ComposedJob, longer
from composed_script import ComposedScript
from container_engine import built_image, unavailable_reason

collect_ignore_glob = [] if os.environ.get("PARASHARD_CONTAINERS") == "1" else ["test_*.py"]


@pytest.fixture(scope="session")
def image() -> str:
    """Return the name of the image, built from this source; skip the test where there is no engine to do that."""
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(f"no containers here: {reason}")
    return built_image()


@pytest.fixture
def compose(image: str, tmp_path: Path) -> Iterator[Callable[..., ComposedJob]]:
    """Return a function that brings an example up by the compose file; it goes down with the test.

    It is not over before the test lets it end.
    """
    jobs: list[ComposedJob] = []

    def up(example: str, *, workers: int, quick_until: int = 1, prometheus: str = "", more: str = "") -> ComposedJob:
        job = longer(example, tmp_path, quick_until=quick_until, more=more)
        jobs.append(ComposedJob(image, job, workers=workers, prometheus=prometheus))
        jobs[-1].up()
        return jobs[-1]

    yield up
    for job in jobs:
        job.down()


@pytest.fixture
def compose_script(image: str, tmp_path: Path) -> Iterator[Callable[..., ComposedScript]]:
    """Return a function that brings a script up by the compose file of scripts; it goes down with the test."""
    scripts: list[ComposedScript] = []

    def up(text: str, words: str, *, workers: int) -> ComposedScript:
        scripts.append(ComposedScript(image, tmp_path, text, words, workers=workers))
        scripts[-1].up()
        return scripts[-1]

    yield up
    for script in scripts:
        script.down()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run composed jobs one at a time, and give the first one the time that building takes."""
    for item in items:
        if item.path.parent.name == "containers":
            item.add_marker(pytest.mark.xdist_group("containers"))
            item.add_marker(pytest.mark.timeout(1800))
