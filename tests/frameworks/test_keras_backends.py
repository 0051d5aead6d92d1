"""Keras has one backend a process: the tests of Keras models again on the other one, and a refused one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from support.command_run import ROOT

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _installed() -> None:
    for name in ("keras", "torch"):
        if find_spec(name) is None:
            pytest.skip(f"NO TEST OF ps.keras: no {name}; `make test-frameworks` has it")


def under(backend: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "KERAS_BACKEND": backend}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False
    )


MORE = pytest.mark.full("they run on JAX; on PyTorch the training does")
TESTS = (
    pytest.param("test_keras_models.py test_keras_state.py test_keras_metrics.py test_keras_mistakes.py", marks=MORE),
    "test_keras_training.py test_keras_optimizer_state.py",
    pytest.param("test_keras_embeddings.py test_keras_ids.py test_keras_table_training.py", marks=MORE),
)


@pytest.mark.parametrize("tests", TESTS)
def test_models_on_pytorch(tests: str) -> None:
    files = [f"tests/frameworks/{name}" for name in tests.split()]
    done = under("torch", "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *files)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("backend", ["tensorflow", "openvino", "numpy"])
def test_another_backend_is_refused(backend: str) -> None:
    done = under(backend, "-c", "import parashard as ps; ps.keras.Model(dict)")
    assert done.returncode == 1
    assert "KERAS_BACKEND=jax or KERAS_BACKEND=torch" in done.stderr.splitlines()[-1]
