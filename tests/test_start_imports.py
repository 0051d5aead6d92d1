"""What a process imports as it starts: nothing that only some jobs, or only some commands, have a use for.

By name, for time depends on the machine; `python -m benchmarks.start_costs` has the seconds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

RARELY = {
    "cryptography": "reads certificates: only with --tls-dir",
    "cupy": "a card",
    "fsspec": "an object store, not a folder",
    "kubernetes": 'only with cluster.launcher = "kubernetes"',
    "matplotlib": "plots of benchmarks",
    "opentelemetry": "only with --trace",
    "pandas": "nothing of ours has a use for it",
    "pyarrow": 'only with data.source = "parquet"',
    "s3fs": "an object store, not a folder",
    "scipy": "comes with Numba and scikit-learn",
    "sklearn": "only where it has the digits, whose file is read without it",
}
"""What neither a service nor a command imports as it starts, and what for it is imported."""

SERVICE = {
    "llvmlite": "compiles: a shard's kernels, and encodings",
    "numba": "compiles: a shard's kernels, which load beside the rest of its start, and encodings",
    "rich": "people's terminals, and structlog where it finds it",
    "parashard.cli": "people's commands",
    "shellingham": "comes with typer",
    "typer": "people's commands",
}
NO_ARRAYS = {"safetensors": "a worker has neither weights on a disk nor checkpoints"}
COMMAND = {
    "google": "asks processes",
    "grpc": "asks processes",
    "numba": "compiles",
    "numpy": "computes",
    "parashard.job": "reads job files: the commands that take one",
    "parashard.launch": "starts processes: `run`, `resume`, `chaos`",
    "prometheus_client": "is in services",
    "pydantic": "checks job files: the commands that take one",
    "rich": "the live view and tables",
    "structlog": "is in services",
    "tenacity": "asks processes",
}

STARTS = {
    "worker": ("import parashard_worker.__main__", RARELY | SERVICE | NO_ARRAYS),
    "coordinator": ("import parashard_coordinator.__main__", RARELY | SERVICE),
    "shard": ("import parashard_server.__main__", RARELY | SERVICE),
    "parashard --help": ("import runpy, sys; sys.argv[1:] = ['--help']\nif 1:\n {run}", RARELY | COMMAND),
    "parashard health": (
        "import parashard.cli.main, parashard.cli.health",
        RARELY | {"grpc": "", "numpy": "", "rich": ""},
    ),
}
