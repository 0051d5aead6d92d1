"""Makes the peers' environments: a venv for each, under `.peers/`, with the versions that `requirements/` pins.

    python -m benchmarks.peers.environments [--environments FOLDER] [PEER ...]

An environment that is there already is left as it is: delete its folder to have it made again. Knows nothing of what
runs in it. `python_of` is asked by the races.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from parashard.errors import ConfigurationError

REQUIREMENTS = Path(__file__).parent / "requirements"
PEERS = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))
DEFAULT_FOLDER = Path(__file__).parent.parent.parent / ".peers"
MADE = "made"  # a file in an environment that is whole


def python_of(folder: Path, peer: str) -> Path:
    """Return the interpreter of a peer's environment.

    Raises
    ------
    ConfigurationError
        If the environment is not there.
    """
    python = folder / peer / "bin" / "python"
    if not python.exists():
        raise ConfigurationError(
            f"{folder} has no environment of {peer}; `python -m benchmarks.peers.environments {peer}` makes one"
        )
    return python


def make(folder: Path, peer: str) -> None:
    """Create a peer's environment, unless it is there.

    Raises
    ------
    CalledProcessError
        If a package cannot be installed; pip names it on standard error.
    """
    place = folder / peer
    if (place / MADE).exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    install = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--requirement", str(REQUIREMENTS / f"{peer}.txt")], check=True)
    (place / MADE).touch()


def main() -> None:
    """Make the environments that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--environments", type=Path, default=DEFAULT_FOLDER, help="folder to create them in (default: .peers)"
    )
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"peers to install: {', '.join(PEERS)} (default: all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.peers) - set(PEERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; peers are {', '.join(PEERS)}")
    for peer in arguments.peers or PEERS:
        print(peer, flush=True)
        make(arguments.environments, peer)


if __name__ == "__main__":
    main()
