"""The origin of a table's figures: processor, cores, versions, date, command."""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from importlib.metadata import version

PACKAGES = ("grpcio", "numpy", "numba", "protobuf")


def described() -> dict[str, str]:
    """Return the machine and the versions, by name."""
    with open("/proc/cpuinfo") as lines:
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "cpu": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "command": f"python -m {_module()} {' '.join(arguments())}".strip(),
    }


def arguments() -> list[str]:
    """Return the arguments, without the paths of this machine."""
    before = ["", *sys.argv[1:]]
    folders = ("--beside", "--data", "--scratch", "--environments", "--results", "--profile")
    return ["FOLDER" if option in folders else word for option, word in zip(before, sys.argv[1:], strict=False)]


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else sys.argv[0]
