"""Classify GPU faults by the errors that PyTorch, JAX and CuPy raise: a lost context, or memory that ran out.

Pure: it reads types and messages of an error and its causes, and imports no framework. A context is lost after the
errors for which CUDA's documentation says that "the process must be terminated and relaunched".
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator

CHAIN_MAX = 16  # errors that are looked at, an error and its causes


class GpuFault(enum.Enum):
    """A fault of a GPU."""

    LOST_CONTEXT = enum.auto()  # this process cannot use the GPU again
    OUT_OF_MEMORY = enum.auto()  # the next attempt may succeed, if it needs less


# Names of the runtime (CuPy) and of the driver (JAX), and the runtime's message (PyTorch; the others have it, too).
_LOST = re.compile(
    r"(?:cudaErrorAssert|CUDA_ERROR_ASSERT|device-side assert triggered"  # 710
    r"|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS|an illegal memory access was encountered"  # 700
    r"|cudaErrorLaunchFailure|CUDA_ERROR_LAUNCH_FAILED|unspecified launch failure"  # 719
    r"|cudaErrorLaunchTimeout|CUDA_ERROR_LAUNCH_TIMEOUT|the launch timed out and was terminated"  # 702
    r"|cudaErrorHardwareStackError|CUDA_ERROR_HARDWARE_STACK_ERROR|hardware stack error"  # 714
    r"|cudaErrorIllegalInstruction|CUDA_ERROR_ILLEGAL_INSTRUCTION|an illegal instruction was encountered"  # 715
    r"|cudaErrorMisalignedAddress|CUDA_ERROR_MISALIGNED_ADDRESS|misaligned address"  # 716
    r"|cudaErrorInvalidAddressSpace|CUDA_ERROR_INVALID_ADDRESS_SPACE"
    r"|operation not supported on global/shared address space"  # 717
    r"|cudaErrorInvalidPc|CUDA_ERROR_INVALID_PC|invalid program counter"  # 718
    r"|cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE|uncorrectable ECC error"  # 214
    r"|cudaErrorNvlinkUncorrectable|CUDA_ERROR_NVLINK_UNCORRECTABLE|uncorrectable NVLink error"  # 220
    r"|cudaErrorContained|CUDA_ERROR_CONTAINED"  # 226
    r"|cudaErrorContextIsDestroyed|CUDA_ERROR_CONTEXT_IS_DESTROYED|context is destroyed"  # 709
    r"|CUBLAS_STATUS_EXECUTION_FAILED|CUDNN_STATUS_EXECUTION_FAILED)"  # a library's words for a kernel that failed
)
_NO_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|\ARESOURCE_EXHAUSTED: .*(?:[Oo]ut of memory|[Ff]ailed to allocate)"  # XLA
)
_NO_MEMORY_TYPES = ("OutOfMemoryError",)  # PyTorch's and CuPy's
_OF_A_GPU = re.compile(r"CUDA|CUBLAS|CUDNN", re.IGNORECASE)


def fault_of(error: BaseException) -> GpuFault | None:
    """Return the GPU fault that an error reports, or None."""
    # A lost context counts before memory that ran out: errors that follow it may say anything.
    found = {_told_by(one) for one in _chain(error)}
    return next((fault for fault in GpuFault if fault in found), None)


def _told_by(error: BaseException) -> GpuFault | None:
    said = str(error)
    if _LOST.search(said) and _OF_A_GPU.search(said):
        return GpuFault.LOST_CONTEXT
    if type(error).__name__ in _NO_MEMORY_TYPES or _NO_MEMORY.search(said):
        return GpuFault.OUT_OF_MEMORY
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    one: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if one is None:
            return
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
