"""What errors of PyTorch, JAX and CuPy say of a GPU, by their own messages."""

from __future__ import annotations

import pytest

from parashard.errors import ConfigurationError
from parashard.process.cuda_faults import GpuFault, fault_of

LOST, MEMORY = GpuFault.LOST_CONTEXT, GpuFault.OUT_OF_MEMORY
LATE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
TORCH_MEMORY = (
    "CUDA out of memory. Tried to allocate 200.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 138.01 GiB is "
    "free. Including non-PyTorch memory, this process has 1.78 GiB memory in use. Of the allocated memory 1.10 GiB is "
    "allocated by PyTorch, and 12.00 MiB is reserved by PyTorch but unallocated."
)


def error_of(kind: str, said: str) -> BaseException:
    """Return an error of a framework that is not installed here, by its type's name."""
    raised: BaseException = type(kind, (RuntimeError,), {})(said)
    return raised


@pytest.mark.parametrize(
    ("kind", "said", "fault"),
    [
        ("AcceleratorError", f"CUDA error: device-side assert triggered{LATE}", LOST),
        (
            "AcceleratorError",
            "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/cuda/"
            f"cuda-runtime-api/group__CUDART__TYPES.html for more information.{LATE}",
            LOST,
        ),
        ("RuntimeError", f"CUDA error: an illegal memory access was encountered{LATE}", LOST),
        ("RuntimeError", f"CUDA error: unspecified launch failure{LATE}", LOST),
        ("AcceleratorError", f"CUDA error: uncorrectable ECC error encountered{LATE}", LOST),
        ("AcceleratorError", f"CUDA error: misaligned address{LATE}", LOST),
        (
            "RuntimeError",
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
            LOST,
        ),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", LOST),
        ("OutOfMemoryError", TORCH_MEMORY, MEMORY),
        ("AcceleratorError", f"CUDA error: out of memory{LATE}", MEMORY),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", MEMORY),
        ("AcceleratorError", f"CUDA error: no kernel image is available for execution on the device{LATE}", None),
        ("AcceleratorError", f"CUDA error: invalid device ordinal{LATE}", None),
        ("RuntimeError", "Expected all tensors to be on the same device, but found cuda:0 and cpu!", None),
        (
            "XlaRuntimeError",
            "INTERNAL: Failed to retrieve branch_index value on stream 0x5583: CUDA error: Could not synchronize CUDA "
            "stream: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered.",
            LOST,
        ),
        (
            "JaxRuntimeError",
            "INTERNAL: Failed to launch CUDA kernel: fusion_1560 with block dimensions: 160x1x1 and grid dimensions: "
            "1x1x1: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure",
            LOST,
        ),
        ("JaxRuntimeError", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7406166528 bytes.", MEMORY),
        (
            "XlaRuntimeError",
            "RESOURCE_EXHAUSTED: Failed to allocate request for 2.99GiB (3206250496B) on device ordinal 0",
            MEMORY,
        ),
        ("JaxRuntimeError", "RESOURCE_EXHAUSTED: too many requests", None),
        ("JaxRuntimeError", "INVALID_ARGUMENT: Argument does not match host shape", None),
        ("CUDARuntimeError", "cudaErrorIllegalAddress: an illegal memory access was encountered", LOST),
        ("CUDARuntimeError", "cudaErrorAssert: device-side assert triggered", LOST),
        ("CUDARuntimeError", "cudaErrorECCUncorrectable: uncorrectable ECC error encountered", LOST),
        ("CUDADriverError", "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure", LOST),
        ("OutOfMemoryError", "Out of memory allocating 4,294,967,296 bytes (allocated so far: 512 bytes).", MEMORY),
        ("CUDARuntimeError", "cudaErrorMemoryAllocation: out of memory", MEMORY),
        ("CUDARuntimeError", "cudaErrorInvalidValue: invalid argument", None),
        ("MemoryError", "Unable to allocate 14.9 GiB for an array with shape (2000000000,)", None),
        ("KeyError", "'bias'", None),
        ("AssertionError", "", None),
    ],
)
def test_what_an_error_says_of_the_gpu(kind: str, said: str, fault: GpuFault | None) -> None:
    assert fault_of(error_of(kind, said)) is fault


def raised_while(handled: BaseException, error: BaseException, **how: BaseException | None) -> BaseException:
    """Return an error that was raised while another was handled, with what `raise ... from` says."""
    error.__context__ = handled
    if "cause" in how:
        error.__cause__ = how["cause"]  # as `raise ... from` does, which also hides the context
    return error


def test_an_error_that_was_raised_for_another_tells_what_that_one_does() -> None:
    lost, memory = error_of("AcceleratorError", "CUDA error: misaligned address"), error_of("OutOfMemoryError", "")
    assert fault_of(raised_while(lost, ValueError("the loss of outputs of shape (4, 2)"), cause=lost)) is LOST
    assert fault_of(raised_while(memory, KeyError("while it was handled"))) is MEMORY


def test_one_that_was_raised_in_place_of_another_does_not() -> None:
    memory = error_of("OutOfMemoryError", TORCH_MEMORY)
    assert fault_of(raised_while(memory, ConfigurationError("too large"), cause=None)) is None


def test_a_lost_context_counts_before_memory() -> None:
    error = error_of("OutOfMemoryError", TORCH_MEMORY)
    error.__cause__ = error_of("CUDARuntimeError", "cudaErrorIllegalAddress: an illegal memory access was encountered")
    assert fault_of(error) is LOST


def test_errors_that_name_each_other_are_looked_at_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert fault_of(first) is None
