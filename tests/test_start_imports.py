"""What a process imports as it starts: nothing that only some jobs, or only some commands, have a use for.

By name, for time depends on the machine; `python -m benchmarks.start_costs` has the seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parashard.job.load import as_toml, job_from_toml

RARELY = {
    "cryptography": "reads certificates: only with --tls-dir",
    "cupy": "a GPU",
    "kubernetes": 'only with cluster.launcher = "kubernetes"',
    "matplotlib": "plots of benchmarks",
    "obstore": "an object store, not a folder",
    "opentelemetry": "only with --trace",
    "pandas": "nothing of ours has a use for it",
    "pyarrow": 'only with data.source = "parquet"',
    "scipy": "comes with Numba and scikit-learn",
    "sklearn": "only where it has the digits, whose file is read without it",
}
"""What neither a service nor a command imports as it starts, and what for it is imported."""

SERVICE = {
    "pydantic": "has the words for what is wrong in a job, and in a record of a store",
    "prometheus_client": "what /metrics shows: the first scrape imports it",
    "difflib": "has what was meant by a wrong key",
    "http.server": "the first connection to the HTTP port imports it",
    "sysconfig": "tells a user's code from others' where it fails",
    "tenacity": "calls that have to be made again",
    "parashard.data.tables": "reads tables: only where data.source is one",
    "parashard.data.npz": 'reads archives: only with data.source = "npz"',
    "parashard.layers": "computes: only the job's own model is imported",
    "llvmlite": "loads a shard's kernels; their start has it, not that of the service",
    "numba": "compiles: a shard's kernels, which an earlier start has left compiled, and encodings",
    "rich": "people's terminals",
    "parashard.cli": "people's commands",
    "shellingham": "comes with typer",
    "typer": "people's commands",
}
WORKER = {
    "grpc_health.v1": "a worker serves nothing by gRPC",
    "safetensors": "a worker has neither weights on a disk nor checkpoints",
}
COORDINATOR = {
    "parashard.encodings.codec": "workers encode, shards decode",
    "safetensors": "given weights, and those of the job's end",
    "importlib.resources": "templates of manifests; the status page's files lie beside the code",
    "parashard_coordinator.api.page": "only for requests to the status page",
    "parashard_coordinator.kubernetes.cluster": 'only with cluster.launcher = "kubernetes"',
    "parashard_coordinator.kubernetes.watching": 'only with cluster.launcher = "kubernetes"',
    "statistics": "loads fractions and decimals",
}
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
    "tenacity": "asks processes",
}

HELP = """
import sys
from parashard.cli.main import main
sys.argv[1:] = ["--help"]
try:
    main()
except SystemExit:
    pass
"""
KERNELS = """
import parashard_server.__main__
from parashard_server.build import ShardBuilder
from support.shard_process import ADAM, job_reply
ShardBuilder(job_reply(optimizer=ADAM), 0).build(1, None)
"""

JOB = """
[job]
name = "start"
epochs = 1
batch_size = 1
[data]
source = "digits"
[model]
kind = "ledger"
[optimizer]
kind = "adam"
"""
READS_ITS_JOB = f"from parashard.job.load import job_from_toml\njob_from_toml({as_toml(job_from_toml(JOB))!r})"

STARTS = {
    "worker's job": (f"import parashard_worker.__main__\n{READS_ITS_JOB}", RARELY | SERVICE | WORKER),
    "coordinator's job": (f"import parashard_coordinator.__main__\n{READS_ITS_JOB}", RARELY | SERVICE | COORDINATOR),
    "shard's job": (f"import parashard_server.__main__\n{READS_ITS_JOB}", RARELY | SERVICE),
    "worker": ("import parashard_worker.__main__", RARELY | SERVICE | WORKER),
    "coordinator": ("import parashard_coordinator.__main__", RARELY | SERVICE | COORDINATOR),
    "shard": ("import parashard_server.__main__", RARELY | SERVICE),
    "parashard --help": (HELP, RARELY | COMMAND),
    "parashard health": ("import parashard.cli.main, parashard.cli.health", RARELY | COMMAND),
    "parashard certs": ("import parashard.cli.main, parashard.cli.certs", (RARELY | COMMAND).keys() - {"cryptography"}),
}


def imported(program: str, **environment: str) -> set[str]:
    """Return the modules that a fresh process has after a program."""
    tell = "import sys\nprint(*sys.modules, file=sys.stderr)"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | environment
    command = [sys.executable, "-P", "-c", f"{program}\n{tell}"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("start", STARTS)
def test_a_start_imports_nothing_that_it_has_no_use_for(start: str) -> None:
    program, unused = STARTS[start]
    modules = imported(program)
    assert any(module.startswith("parashard") for module in modules)
    assert sorted(module for module in modules if any(f"{module}.".startswith(f"{name}.") for name in unused)) == []


def test_a_shard_whose_kernels_are_compiled_imports_no_compiler(tmp_path: Path) -> None:
    cold, warm = (imported(KERNELS, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert {"numba", "llvmlite"} <= cold
    assert sorted(module for module in warm if module.split(".")[0] == "numba") == []


def test_a_service_that_does_not_trace_imports_no_spans_of_its_own() -> None:
    every = "import parashard_coordinator.__main__, parashard_server.__main__, parashard_worker.__main__"
    assert sorted(module for module in imported(every) if module.endswith(".traced")) == []
