"""Podman, and what the image is built from where there is no registry: a base by debootstrap, a wheelhouse by pip.

Owns the wheelhouse's place, under PARASHARD_CONTAINER_CACHE or /var/tmp/parashard-containers; base and layers are kept
by podman. Knows no compose file. Called by the fixtures.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("PARASHARD_CONTAINER_CACHE", "/var/tmp/parashard-containers"))
BASE = "localhost/parashard-test-base:bookworm"
IMAGE = "localhost/parashard:test"
NETWORK = f"parashard-test-{os.getpid()}"
DEBIAN = ("bookworm", "http://deb.debian.org/debian")
BASE_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
PROMETHEUS = "localhost/parashard-test-prometheus:bookworm"
PROMETHEUS_CONTAINERFILE = f"""
FROM {BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus \\
 && install --directory --owner prometheus --group prometheus /prometheus
USER prometheus
ENTRYPOINT ["prometheus"]
"""
SETTINGS = Path(__file__).with_name("containers.conf")
BUILD_DEADLINE_S = 1500.0
PROBE_DEADLINE_S = 300.0
os.environ.setdefault("CONTAINERS_CONF", str(SETTINGS))  # podman's own variable, read by every podman started here


def unavailable_reason() -> str | None:
    """Start a container on a bridge network and return what stands against that; None: nothing does."""
    needed = {
        "podman": shutil.which("podman"),
        "runc, or a CONTAINERS_CONF of your own": shutil.which("runc")
        or os.environ["CONTAINERS_CONF"] != str(SETTINGS),
        f"podman-compose for {sys.executable}": importlib.util.find_spec("podman_compose"),
        "root, to kill processes in containers from outside": os.geteuid() == 0,
    }
    lacking = [what for what, there in needed.items() if not there]
    if lacking:
        return f"needed and not here: {', '.join(lacking)}"
    try:
        if not _exists(BASE):
            _make_base()
        run("podman", "network", "create", NETWORK)
        run("podman", "run", "--rm", "--network", NETWORK, BASE, "true")
        run("podman", "network", "rm", "--force", NETWORK)
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def built_image() -> str:
    """Build the image from this source and return its name; podman takes the layers that are as before."""
    wheelhouse = CACHE / "wheelhouse"
    _fill(wheelhouse)
    run(
        *("podman", "build", "--file", str(ROOT / "deploy/docker/Dockerfile"), "--target", "cpu", "--tag", IMAGE),
        *("--build-arg", f"BASE_IMAGE={BASE}", "--build-arg", "PIP_NO_INDEX=1"),
        *("--volume", f"{wheelhouse}:/wheelhouse:ro", str(ROOT)),
        deadline_s=BUILD_DEADLINE_S,
    )
    return IMAGE


def prometheus_image() -> str:
    """Return the name of an image with Debian's Prometheus, which takes arguments as the official one does."""
    if not _exists(PROMETHEUS):
        containerfile = CACHE / "prometheus.Containerfile"
        containerfile.write_text(PROMETHEUS_CONTAINERFILE)
        run(
            "podman",
            "build",
            "--network",
            "host",
            "--file",
            str(containerfile),
            "--tag",
            PROMETHEUS,
            str(CACHE),
            deadline_s=600.0,
        )
    return PROMETHEUS


def run(*command: str, deadline_s: float = PROBE_DEADLINE_S) -> str:
    """Run a command and return its standard output; a failure carries what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _exists(image: str) -> bool:
    there = subprocess.run(["podman", "image", "exists", image], timeout=PROBE_DEADLINE_S, check=False)
    return there.returncode == 0


def _make_base() -> None:
    root, tarball = CACHE / "rootfs", CACHE / "rootfs.tar"
    shutil.rmtree(root, ignore_errors=True)  # of an earlier try
    root.mkdir(parents=True)
    suite, mirror = DEBIAN
    run(
        *("debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", suite, str(root), mirror),
        deadline_s=BUILD_DEADLINE_S,
    )
    run("tar", "--directory", str(root), "--create", "--file", str(tarball), ".", deadline_s=BUILD_DEADLINE_S)
    run("podman", "import", str(tarball), BASE, deadline_s=BUILD_DEADLINE_S)
    shutil.rmtree(root)
    tarball.unlink()


def _fill(wheelhouse: Path) -> None:
    """Fetch the wheels of the lock file, and what builds our own; those that are there are not fetched again."""
    lock = ROOT / "deploy/docker/requirements.lock"
    filled = wheelhouse / "requirements.lock"
    if filled.exists() and filled.read_bytes() == lock.read_bytes():
        return
    download = (sys.executable, "-m", "pip", "download", "--only-binary", ":all:", "--dest", str(wheelhouse))
    run(*download, "--require-hashes", "--requirement", str(lock), deadline_s=BUILD_DEADLINE_S)
    run(*download, "setuptools>=77", deadline_s=BUILD_DEADLINE_S)
    shutil.copyfile(lock, filled)
