"""How many threads a process computes with, and that every library is told so by its environment."""

from __future__ import annotations

import pytest

from parashard.process import resources
from parashard.process.resources import THREAD_VARIABLES, thread_variables, threads_for


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "cores", lambda: 8)


@pytest.mark.parametrize(
    ("asked", "processes", "reproducible", "threads"),
    [(0, 2, False, 4), (0, 3, False, 2), (0, 20, False, 1), (0, 0, False, 8), (0, 2, True, 1), (3, 2, True, 3)],
)
def test_processes_share_the_cores_evenly(asked: int, processes: int, reproducible: bool, threads: int) -> None:
    assert threads_for(asked, processes, reproducible=reproducible) == threads


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.parametrize("reproducible", [True, False])
def test_a_number_of_the_environment_is_the_user_s_unless_the_job_has_one(variable: str, reproducible: bool) -> None:
    assert threads_for(0, 2, reproducible=reproducible, environ={variable: "5"}) == 5
    assert threads_for(3, 2, reproducible=reproducible, environ={variable: "5"}) == 3


@pytest.mark.parametrize(("text", "threads"), [("6,2", 6), (" 6 ", 6), ("", 4), ("0", 4), ("-1", 4), ("many", 4)])
def test_what_openmp_allows_is_read_and_what_is_no_number_is_not(text: str, threads: int) -> None:
    assert threads_for(0, 2, reproducible=False, environ={"OMP_NUM_THREADS": text}) == threads


def test_every_library_is_configured() -> None:
    found = thread_variables(2, {}, override=False)
    assert found == dict.fromkeys(THREAD_VARIABLES, "2")
    for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB", "NPROC"):  # torch has OMP and MKL, JAX has NPROC
        assert any(variable.startswith(library) for variable in found), library


def test_what_the_user_set_stays_unless_the_job_file_says_otherwise() -> None:
    environ = {"MKL_NUM_THREADS": "7", "OMP_NUM_THREADS": "", "HOME": "/"}
    left = thread_variables(2, environ, override=False)
    assert "MKL_NUM_THREADS" not in left
    assert left["OMP_NUM_THREADS"] == "2", "an empty one says nothing"
    assert thread_variables(2, environ, override=True)["MKL_NUM_THREADS"] == "2"
