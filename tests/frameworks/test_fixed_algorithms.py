"""What a worker sets in a framework so that a step has the same bits in each process."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from parashard.job.load import job_from_toml
from parashard_worker.loading import fix_algorithms
from support.small_job import SMALL_JOB


@pytest.mark.parametrize(
    ("policy", "mixed", "fixed"), [("sync:2", False, True), ("sync:2", True, False), ("async", False, False)]
)
def test_cudnn_computes_alike_in_every_process_where_bits_are_promised(
    monkeypatch: pytest.MonkeyPatch, policy: str, mixed: bool, fixed: bool
) -> None:  # P13
    cudnn = SimpleNamespace(deterministic=False, benchmark=True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(backends=SimpleNamespace(cudnn=cudnn)))
    settings = [("consistency.policy", policy, "--set"), ("cluster.allow_mixed", mixed, "--set")]
    fix_algorithms(job_from_toml(SMALL_JOB, settings))
    assert (cudnn.deterministic, cudnn.benchmark) == (fixed, not fixed)
    monkeypatch.setitem(sys.modules, "torch", None)
    fix_algorithms(job_from_toml(SMALL_JOB, settings))


def test_pytorch_has_these_switches(monkeypatch: pytest.MonkeyPatch) -> None:  # P13
    torch = pytest.importorskip("torch", reason="NO TEST of PyTorch's switches: `make test-frameworks` has it")
    cudnn = torch.backends.cudnn
    for name, value in (("deterministic", False), ("benchmark", True)):
        monkeypatch.setattr(cudnn, name, value)
    fix_algorithms(job_from_toml(SMALL_JOB, [("consistency.policy", "sync:2", "--set")]))
    assert (cudnn.deterministic, cudnn.benchmark) == (True, False)
