"""CUDA code that kernels share: how it is compiled, and operations that keep denormals. Pure.

CuPy's compiler always gets `--ftz=true`, and so flushes denormals of float32 operations by default. These operations
override that, in PTX, and round to nearest, ties to even: their results are bit-identical to the host's. When tests
compile them for a CPU that flushes, they switch that off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPTIONS = ("--fmad=false", "--ftz=true")


def _exact(name: str, instruction: str, operator: str) -> str:
    return f"""
__device__ float exact_{name}(float a, float b) {{
#ifdef __CUDACC__
    float c;
    asm("{instruction}.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#else
    volatile float x = a, y = b;
    unsigned mode = keep_denormals();
    volatile float c = x {operator} y;
    restore_mode(mode);
    return c;
#endif
}}
"""


_DOUBLE = """
__device__ double exact_double(float a) {
#ifdef __CUDACC__
    double c;
    asm("cvt.f64.f32 %0, %1;" : "=d"(c) : "f"(a));
    return c;
#else
    volatile float x = a;
    unsigned mode = keep_denormals();
    volatile double c = x;
    restore_mode(mode);
    return c;
#endif
}
"""

EXACT = "".join(
    _exact(*operation)
    for operation in (
        ("sum", "add", "+"),
        ("difference", "sub", "-"),
        ("product", "mul", "*"),
        ("quotient", "div", "/"),
    )
)
EXACT += _DOUBLE

BITS = """
#ifdef __CUDACC__
__device__ unsigned bits_of(float x) { return __float_as_uint(x); }
__device__ float float_of(unsigned x) { return __uint_as_float(x); }
#else
__device__ unsigned bits_of(float x) { unsigned bits; __builtin_memcpy(&bits, &x, 4); return bits; }
__device__ float float_of(unsigned x) { float value; __builtin_memcpy(&value, &x, 4); return value; }
#endif
"""


def elementwise(
    cupy: Any, name: str, inputs: str, outputs: str, operation: str, *, preamble: str = ""
) -> Callable[..., None]:
    """Return a kernel of CuPy whose operation may use all of the above; it writes to its last arguments."""
    kernel: Callable[..., None] = cupy.ElementwiseKernel(
        inputs,
        outputs,
        operation,
        f"parashard_{name}",
        preamble=EXACT + BITS + preamble,
        options=OPTIONS,
        no_return=True,
    )
    return kernel
