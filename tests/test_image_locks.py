"""What goes into the images is what was tested: the pins of `deploy/docker/` are those of `requirements.lock`."""

import re
from pathlib import Path

from parashard import __version__

ROOT = Path(__file__).resolve().parents[1]


def pins(path: str) -> set[str]:
    """Return the lines NAME==VERSION of a lock file, each with its condition."""
    return set(re.findall(r"^([^\s#]+==[^\\\n]+?) \\$", (ROOT / path).read_text(), re.MULTILINE))


def test_the_images_packages_are_those_of_the_tests():
    assert pins("deploy/docker/requirements.lock")
    assert pins("deploy/docker/requirements.lock") <= pins("requirements.lock"), "`make lock` resolves them again"


def test_the_cuda_image_adds_to_the_packages_and_changes_none():
    versions = {pin.split(" ;")[0].partition("==")[::2] for pin in pins("deploy/docker/requirements.lock")}
    names = {name for name, _ in versions}
    added = {pin.partition("==")[::2] for pin in pins("deploy/docker/requirements-cuda.lock")}
    assert "cupy-cuda12x" in {name for name, _ in added}
    assert {pin for pin in added if pin[0] in names} <= versions


def test_the_images_label_names_this_version():
    labels = re.findall(r"^ARG VERSION=(.*)$", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    assert set(labels) == {__version__}


def test_the_site_adds_to_the_packages_of_the_tests_and_changes_none():
    versions = {pin.split(" ;")[0].partition("==")[::2] for pin in pins("requirements.lock")}
    names = {name for name, _ in versions}
    added = {pin.split(" ;")[0].partition("==")[::2] for pin in pins("docs/requirements.lock")}
    assert "sphinx" in {name for name, _ in added}
    assert {pin for pin in added if pin[0] in names} <= versions, "`make lock` resolves them again"
