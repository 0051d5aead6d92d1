"""A CuPy of a few lines that compiles elementwise kernels for the CPU: their arithmetic can be seen without a GPU.

Says nothing of launches, streams and CUDA's own arithmetic; those take a GPU. In place of `--ftz=true` the processor's
mode is set around the loop, which is a function of its own so that the compiler moves nothing out.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HEAD = """
extern "C" { float fminf(float, float); float fmaxf(float, float); float sqrtf(float); float fabsf(float);
float floorf(float); float rintf(float); }
#define __device__ static inline
#if defined(__x86_64__)
#define MODE() __builtin_ia32_stmxcsr()
#define SET_MODE(mode) __builtin_ia32_ldmxcsr(mode)
#define FLUSHING 0x8040u
#elif defined(__aarch64__)
#define MODE() __builtin_aarch64_get_fpcr()
#define SET_MODE(mode) __builtin_aarch64_set_fpcr(mode)
#define FLUSHING 0x1000000u
#endif
static inline unsigned keep_denormals() { unsigned mode = MODE(); SET_MODE(mode & ~FLUSHING); return mode; }
static inline void restore_mode(unsigned mode) { SET_MODE(mode); }
"""
KERNEL = """
static __attribute__((noinline)) void loop({declared}) {{ for (long long i = 0; i < n; ++i) {{ {body} }} }}
extern "C" void kernel({declared}) {{
    unsigned before = MODE();
    SET_MODE(before | FLUSHING);
    loop({given});
    SET_MODE(before);
}}
"""
C_TYPES = {
    "float32": ("float", ctypes.c_float),
    "float64": ("double", None),
    "int32": ("int", ctypes.c_int),
    "uint32": ("unsigned", None),
    "int64": ("long long", ctypes.c_longlong),
    "uint8": ("unsigned char", ctypes.c_ubyte),
    "uint16": ("unsigned short", None),
    "int8": ("signed char", None),
}
STRICT = ("-O1", "-ffp-contract=off", "-shared", "-fPIC", "-x", "c++")


class Resident(np.ndarray):
    """A vector that only kernels and `get` may look into, by convention."""

    def get(self, stream: Any = None, out: np.ndarray | None = None, blocking: bool = True) -> np.ndarray:
        if out is None:
            return np.array(self)
        out[...] = self
        return out


class CompiledCupy:
    """What kernels use of the module `cupy`.

    Parameters
    ----------
    compiler : str
        A C++ compiler.
    folder : Path
        For what it makes.
    """

    def __init__(self, compiler: str, folder: Path) -> None:
        self._compiler = compiler
        self._folder = folder
        self._compiled: dict[str, ctypes.CDLL] = {}

    def empty_like(self, array: np.ndarray) -> np.ndarray:
        return np.full_like(array, np.nan)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else 99, dtype).view(Resident)

    def zeros(self, shape: int, dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype).view(Resident)

    def asarray(self, values: np.ndarray) -> np.ndarray:
        return np.array(values).view(Resident)

    def ElementwiseKernel(
        self,
        inputs: str,
        outputs: str,
        operation: str,
        name: str,
        *,
        preamble: str,
        options: Sequence[str],
        no_return: bool,
    ) -> Callable[..., None]:
        """Return what runs the operation on each element; compiled at the first call, which shows what is a vector."""
        assert {"--fmad=false", "--ftz=true"} == set(options)
        assert no_return
        parameters = [parameter.split() for parameter in f"{inputs}, {outputs}".split(", ")]

        def call(*arguments: Any) -> None:
            given = list(zip(parameters, arguments, strict=True))
            assert all(vector.flags.c_contiguous for _, vector in given if isinstance(vector, np.ndarray))
            whole = {vector.size for (*raw, _, _), vector in given if isinstance(vector, np.ndarray) and not raw}
            assert len(whole) == 1, "vectors of one length, and one at least"
            if name not in self._compiled:
                self._compiled[name] = self._compile(parameters, arguments, operation, name, preamble)
            words = []
            for (*_, kind, _), argument in given:
                if isinstance(argument, np.ndarray):
                    assert argument.dtype == kind
                    words.append(ctypes.c_void_p(argument.ctypes.data))
                else:
                    words.append(C_TYPES[kind][1](argument))
            self._compiled[name].kernel(ctypes.c_longlong(*whole), *words)

        return call

    def _compile(
        self, parameters: list[list[str]], arguments: Sequence[Any], operation: str, name: str, preamble: str
    ) -> ctypes.CDLL:
        declared, bound = [], []
        for (*raw, kind, word), argument in zip(parameters, arguments, strict=True):
            c_type = C_TYPES[kind][0]
            vector = isinstance(argument, np.ndarray)
            declared.append(f"{c_type} *{word}{'' if raw else '_'}" if vector else f"{c_type} {word}")
            if vector and not raw:
                bound.append(f"{c_type} &{word} = {word}_[i];")
        declared = ["long long n", *declared]
        given = ", ".join(one.split()[-1].lstrip("*") for one in declared)
        kernel = KERNEL.format(declared=", ".join(declared), given=given, body=f"{' '.join(bound)} {operation}")
        source = f"{HEAD}{preamble}{kernel}"
        library = self._folder / f"{name}.so"
        subprocess.run([self._compiler, *STRICT, "-", "-o", library, "-lm"], input=source, text=True, check=True)
        return ctypes.CDLL(str(library))
