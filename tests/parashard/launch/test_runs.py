"""What the environment of processes with a user's code has: one seed of hashes, and a cache for JAX."""

from __future__ import annotations

from pathlib import Path

import pytest

from parashard.job.load import job_from_toml
from parashard.launch.local_cluster import MODULES
from parashard.launch.runs import child_variables, hash_variables, jax_variables
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
