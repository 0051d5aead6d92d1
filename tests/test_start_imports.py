"""What a process does not import as it starts: optional packages, and what would make a command slow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

EXTRAS = {
    "cupy": "a GPU",
    "jax": "a model of this framework",
    "keras": "a model of this framework",
    "kubernetes": 'cluster.launcher = "kubernetes"',
    "obstore": "an object store",
    "opentelemetry.sdk": "--trace",
    "pyarrow": "Parquet files",
    "sklearn": "the digits",
    "tensorboard": "its callback",
    "torch": "a model of this framework",
}
"""Optional packages, and what for each is imported."""
COMMAND = {"grpc", "numba", "numpy", "prometheus_client", "pydantic", "rich"}
"""Packages that neither `import parashard` nor `parashard --help` waits for."""

HELP = """
import sys
from parashard.cli.main import main
sys.argv[1:] = ["--help"]
try:
    main()
except SystemExit:
    pass
"""

STARTS = {
    "coordinator": ("import parashard_coordinator.__main__", {*EXTRAS}),
    "shard": ("import parashard_server.__main__", {*EXTRAS}),
    "worker": ("import parashard_worker.__main__", {*EXTRAS}),
    "import parashard": ("import parashard", {*EXTRAS, *COMMAND}),
    "parashard --help": (HELP, {*EXTRAS, *COMMAND}),
}
"""Programs, and what none of them may have imported at its end."""


@pytest.mark.parametrize("start", STARTS)
def test_a_start_imports_no_optional_package_and_a_command_nothing_slow(start: str) -> None:
    program, unused = STARTS[start]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-c", f"{program}\nimport sys\nprint(*sys.modules, file=sys.stderr)"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    modules = done.stderr.split()
    assert any(module.startswith("parashard") for module in modules)
    assert [module for module in modules if any(f"{module}.".startswith(f"{name}.") for name in unused)] == []
