"""A GPU's fault in a step: what is said of it, and what ends (P26)."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.data.base import Batch
from parashard.errors import Unavailable
from parashard.process.run_files import short_path
from parashard_worker.gpu_copies import NotCopied
from parashard_worker.gpu_faults import PROCESS_MUST_END, lost_context, out_of_memory
from parashard_worker.loop import StepLoop
from parashard_worker.transfers import Transfers
from support.loop_cases import Job, ScriptedLeasing, evaluation

ASSERT = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`"
NO_MEMORY = "CUDA out of memory. Tried to allocate 200.00 GiB. " + 40 * "GPU 0 has a total capacity of 139.80 GiB. "
LATE = "a kernel's error is told late: with CUDA_LAUNCH_BLOCKING=1 the line is the one that caused it"


class AcceleratorError(RuntimeError):
    """PyTorch's."""


class OutOfMemoryError(RuntimeError):
    """PyTorch's and CuPy's."""


def job_of(said: Exception, *work: Any, at: int = 1, depth: int = 0, ends_process: bool) -> Job:
    """Return a job of which a step, or an evaluation, raises."""

    def raising(batch: Batch) -> None:
        if batch.step == at:
            raise said

    job = Job(*work, depth=depth)
    job.model.before = raising
    job.loop = StepLoop(job.task, job.cluster.client(), job.leasing, depth=depth, ends_process=ends_process)  # type: ignore[arg-type]
    return job


@pytest.mark.parametrize("depth", [0, 1])
def test_a_lost_context_ends_the_worker_once_its_step_is_reported(depth: int) -> None:
    job = job_of(AcceleratorError(ASSERT), *range(5), depth=depth, ends_process=True)
    with pytest.raises(Unavailable, match=r"^step 1 \(examples [0-9, ]+\): the GPU's context is lost: ") as ended:
        job.run()
    examples = ", ".join(map(str, job.steps.indices(1)))
    assert f"(examples {examples})" in str(ended.value)
    assert f"{short_path(__file__)}:" in job.leasing.failures[1]
    assert job.leasing.failures[1].endswith(f": AcceleratorError: CUDA error: device-side assert triggered; {LATE}")
    assert job.leasing.kinds == {1: pb.FAILURE_KIND_MODEL}, "as any error of a model, it is an attempt"
    assert job.model.computed == [0], "nothing more is computed in that context"


def test_in_a_program_that_does_more_the_job_fails_at_once() -> None:
    job = job_of(AcceleratorError(ASSERT), *range(2), ends_process=False)
    job.run()
    assert job.leasing.kinds == {1: pb.FAILURE_KIND_WRONG_RESULT}, "no other attempt is made"
    said = job.leasing.failures[1]
    assert said.startswith("step 1 (examples ")
    assert said.endswith(f"{LATE}; {PROCESS_MUST_END}")


@pytest.mark.parametrize(
    ("ends_process", "kind"), [(True, pb.FAILURE_KIND_MODEL), (False, pb.FAILURE_KIND_WRONG_RESULT)]
)
def test_one_that_is_lost_in_an_evaluation_is_no_step_s(ends_process: bool, kind: Any) -> None:
    job = job_of(AcceleratorError(ASSERT), evaluation(4), at=-1, ends_process=ends_process)
    if ends_process:
        with pytest.raises(Unavailable, match=r"^the evaluation after step 4: the GPU's context is lost: "):
            job.run()
    else:
        job.run()
    assert job.leasing.failures == {}
    assert job.leasing.evaluation_kinds == {4: kind}
    assert ("no worker has a process of its own" in job.leasing.evaluations[4][1]) is not ends_process


def test_another_error_of_an_evaluation_is_an_attempt_as_before() -> None:
    job = job_of(KeyError("bias"), evaluation(4), at=-1, ends_process=True).run()
    assert job.leasing.evaluation_kinds == {4: pb.FAILURE_KIND_MODEL}


def test_out_of_memory_names_the_batch_size_to_try_and_the_worker_goes_on() -> None:
    job = job_of(OutOfMemoryError(NO_MEMORY), *range(3), ends_process=True).run()
    assert job.leasing.kinds == {1: pb.FAILURE_KIND_MODEL}
    said = job.leasing.failures[1]
    assert said.startswith("the GPU is out of memory; 4 examples at once are too many: try batch_size 2, not 4; ")
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 200.00 GiB" in said
    assert job.completed == [0, 2]


@pytest.mark.parametrize(("backend", "what"), [("cpu", "this machine"), ("gpu", "the GPU")])
def test_jax_runs_out_of_the_memory_of_what_it_computes_on(
    monkeypatch: pytest.MonkeyPatch, backend: str, what: str
) -> None:
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(default_backend=lambda: backend))
    said = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8796093022208 bytes.")
    job = job_of(said, *range(2), ends_process=True).run()
    assert job.leasing.failures[1].startswith(f"{what} is out of memory; 4 examples at once are too many: try batch_si")


def test_gradients_that_a_lost_context_kept_from_the_host_are_no_failed_attempt() -> None:
    leasing: Any = ScriptedLeasing()
    transfers = Transfers(Job().cluster.client(), leasing, None)
    for step, said in enumerate(("cudaErrorAssert: device-side assert triggered", "cudaErrorInvalidValue")):
        error = NotCopied(f"the GPU failed while gradients were copied to the host: {said}")
        error.__cause__ = RuntimeError(said)
        transfers.report_failure(step, error)
    assert leasing.drops == [0], "the next step tells, and ends the worker"
    assert list(leasing.failures) == [1]


@pytest.mark.parametrize(
    ("examples", "batch_size", "held", "said"),
    [
        (64, 128, "", "the GPU is out of memory; 64 examples at once are too many: try batch_size 64, not 128; "),
        (
            5,
            5,
            "0.1 of 79.1 GiB are free",
            "the GPU is out of memory (0.1 of 79.1 GiB are free); 5 examples at once are too many: try batch_size 2, ",
        ),
        (
            1,
            1,
            "",
            "the GPU is out of memory; one example at a time is too much: try a smaller model, or more memory",
        ),
        (None, 1, "", "the GPU is out of memory; try smaller batches; OutOfMemoryError: CUDA out of memory. Tried"),
    ],
)
def test_what_is_said_of_memory(examples: int | None, batch_size: int, held: str, said: str) -> None:
    found = out_of_memory(OutOfMemoryError(NO_MEMORY), examples, batch_size, held)
    assert found.startswith(said)
    assert len(found) < 500, "what a report takes"


def test_the_first_line_of_an_error_is_enough() -> None:
    assert lost_context(AcceleratorError(ASSERT)) == (
        f"the GPU's context is lost: AcceleratorError: CUDA error: device-side assert triggered; {LATE}"
    )
