"""What the environment of processes with a user's code has: one seed of hashes, and a cache for JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parashard.job.load import job_from_toml
from parashard.launch.local_cluster import MODULES
from parashard.launch.runs import child_variables, gpus, hash_variables, jax_share, jax_variables
from support.small_job import SMALL_JOB


def test_a_worker_and_the_coordinator_have_one_seed_of_hashes(tmp_path: Path) -> None:
    job = job_from_toml(SMALL_JOB, [("job.seed", 2**32 + 7, "--set")])
    found = child_variables(job, {"HOME": str(tmp_path)}, jax=True)
    assert {found[MODULES[role]]["PYTHONHASHSEED"] for role in ("worker", "coordinator")} == {"7"}
    assert found[MODULES["worker"]]["JAX_COMPILATION_CACHE_DIR"].startswith(f"{tmp_path}/.cache/parashard/jax-")
    assert MODULES["shard"] not in found
    without = child_variables(job, {"HOME": str(tmp_path)}, jax=False)[MODULES["worker"]]
    assert "JAX_COMPILATION_CACHE_DIR" not in without


@pytest.mark.parametrize(("own", "due"), [("0", {}), ("12", {}), ("random", {"PYTHONHASHSEED": "3"})])
def test_the_first_process_s_own_seed_stays(own: str, due: dict[str, str]) -> None:
    assert hash_variables(3, {"PYTHONHASHSEED": own}) == due


def test_the_users_cache_of_jax_stays(tmp_path: Path) -> None:
    assert jax_variables({"HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": ""}) == {}
    assert jax_variables({}) == {}
    assert jax_variables({"HOME": "/proc/none"}) == {}
    chosen = jax_variables({"HOME": "/proc/none", "XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert Path(chosen["JAX_COMPILATION_CACHE_DIR"]).parent == tmp_path / "cache" / "parashard"
    assert Path(chosen["JAX_COMPILATION_CACHE_DIR"]).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("device", "workers", "cards", "share"),
    [
        ("cuda:0", 2, 1, "0.3750"),
        ("cuda:0", 2, 8, "0.3750"),  # all on one
        ("cuda", 4, 2, "0.3750"),
        ("auto", 3, 2, "0.3750"),  # two of them on the first
        ("cpu", 3, 1, "0.2500"),  # JAX computes on its own default device
        ("auto", 2, 2, None),
        ("cuda:0", 1, 1, None),
        ("auto", 0, 1, None),
        ("auto", 4, 0, None),
    ],
)
def test_workers_that_share_a_gpu_are_told_jaxs_share(device: str, workers: int, cards: int, share: str | None) -> None:
    settings = [("cluster.device", device, "--set"), ("cluster.workers", workers, "--set")]
    job = job_from_toml(SMALL_JOB, settings)
    assert jax_share(job, {}, cards) == ({} if share is None else {"XLA_CLIENT_MEM_FRACTION": share})


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_users_share_stays(name: str) -> None:
    job = job_from_toml(SMALL_JOB, [("cluster.workers", 2, "--set"), ("cluster.device", "cuda:0", "--set")])
    assert jax_share(job, {name: ".4"}, 1) == {}


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("", 0), ("0", 1), ("1,0", 2), ("0,-1,1", 1), ("GPU-8932f937", 1), ("0,1,2", 2)]
)
def test_gpus_are_counted_without_being_opened(tmp_path: Path, visible: str | None, count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == count


@pytest.mark.parametrize(("own", "due"), [(None, "false"), ("true", "true"), ("", "")])
def test_jax_preallocates_nothing_unless_the_user_says_so(own: str | None, due: str) -> None:
    """A process that only starts others has no use for it, and its children inherit the variable."""
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    environ = {key: value for key, value in os.environ.items() if key != name} | ({} if own is None else {name: own})
    source = f"import parashard, os; print(os.environ[{name!r}])"
    assert subprocess.check_output([sys.executable, "-c", source], env=environ, text=True).strip() == due
