"""Declaration of the kernels' loops, and instructions for them that Numba lacks. Knows no loop."""

# Functions of Numba and llvmlite have no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from parashard.process.cached_code import Loop, Vector

VECTOR = Vector("float32")
SUMS = Vector("float64")
KEYS = Vector("uint64")
REFERENCES = Vector("uint32")
TAGS = Vector("uint8")
NUMBERS = Vector("int64")

_VOID, _INT32, _INT64, _FLOAT = ir.VoidType(), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES = ir.IntType(8).as_pointer()

BLOCK_WORDS = 8
"""Float32s in a register of AVX."""

LOOPS: dict[str, Loop] = {}
"""The loops of `loops`, `row_loops` and `index_loops`, by name."""
_SOURCES = tuple(Path(__file__).parent.glob("*.py"))


compiled_form_of: Any = overload
"""Declare the form of a function within loops: @compiled_form_of(function) decorates a function that returns it."""


def _ahead(typing: Any, array: Any, index: Any) -> Any:

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        held = context.make_array(signature.args[0])(context, builder, given[0])
        place = builder.bitcast(builder.gep(held.data, [given[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, _INT32, _INT32, _INT32])
        brought = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(brought, [place, _INT32(0), _INT32(3), _INT32(1)])  # to be read, kept near, data
        return context.get_dummy_value()

    return types.void(array, index), code


ahead: Any = intrinsic(_ahead)
"""Within a loop, ahead(array, index): prefetch the cache line of array[index]."""


def _eight(typing: Any, tags: Any, index: Any) -> Any:

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        held = context.make_array(signature.args[0])(context, builder, given[0])
        return builder.load(builder.bitcast(builder.gep(held.data, [given[1]]), _INT64.as_pointer()), align=1)

    return types.uint64(tags, index), code


eight: Any = intrinsic(_eight)
"""Within a loop, eight(tags, index): eight tags as one number, the first in its lowest bits."""


def _lowest(typing: Any, bits: Any) -> Any:

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.cttz(given[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(bits), code


lowest: Any = intrinsic(_lowest)
"""Within a loop, lowest(bits): the index of the lowest bit that is set; there must be one."""


def _copied_block(typing: Any, target: Any, to: Any, source: Any, begin: Any) -> Any:

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        def place(number: int) -> Any:
            held = context.make_array(signature.args[number])(context, builder, given[number])
            start = builder.gep(held.data, [given[number + 1]])
            return builder.bitcast(start, ir.VectorType(_FLOAT, BLOCK_WORDS).as_pointer())

        builder.store(builder.load(place(2), align=4), place(0), align=4)
        return context.get_dummy_value()

    return types.void(target, to, source, begin), code


copy_block: Any = intrinsic(_copied_block)
"""Within a loop, copy_block(target, to, source, begin): copy BLOCK_WORDS float32s by one load and one store."""


_FLUSHING = {"x86_64": 1 << 15 | 1 << 6, "aarch64": 1 << 24}
"""Bits of a processor's mode by which denormals are 0 as operands and as results: MXCSR's FTZ and DAZ, FPCR's FZ."""


def _processor(builder: Any) -> str:
    return str(builder.module.triple).partition("-")[0]


def _call(builder: Any, name: str, result: Any, *given: Any) -> Any:
    kind = ir.FunctionType(result, [one.type for one in given])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)


def _mode(builder: Any) -> Any:
    """Read this thread's floating-point mode."""
    if _processor(builder) == "aarch64":
        return _call(builder, "llvm.aarch64.get.fpcr", _INT64)
    place = cgutils.alloca_once(builder, _INT32)
    _call(builder, "llvm.x86.sse.stmxcsr", _VOID, builder.bitcast(place, _BYTES))
    return builder.zext(builder.load(place), _INT64)


def _set_mode(builder: Any, mode: Any) -> None:
    if _processor(builder) == "aarch64":
        _call(builder, "llvm.aarch64.set.fpcr", _VOID, mode)
        return
    place = cgutils.alloca_once(builder, _INT32)
    builder.store(builder.trunc(mode, _INT32), place)
    _call(builder, "llvm.x86.sse.ldmxcsr", _VOID, builder.bitcast(place, _BYTES))


def _barrier(builder: Any) -> None:
    """Keep the compiler from moving loads and stores across; arithmetic is held by its operands and its result."""
    builder.fence("seq_cst", targetscope="singlethread")


def begin_flushing(builder: Any) -> Any:
    """Emit the code of `flush_denormals`, and return the previous mode."""
    bits = _FLUSHING.get(_processor(builder))
    if bits is None:
        return _INT64(0)
    before = _mode(builder)
    _set_mode(builder, builder.or_(before, _INT64(bits)))
    _barrier(builder)
    return before


def end_flushing(builder: Any, mode: Any) -> None:
    """Emit the code of `restore_mode`."""
    if _processor(builder) in _FLUSHING:
        _barrier(builder)
        _set_mode(builder, mode)


def _flushing(typing: Any) -> Any:

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return begin_flushing(builder)

    return types.uint64(), code


flush_denormals: Any = intrinsic(_flushing)
"""Within a loop, mode = flush_denormals(): from here on a denormal operand or result is a zero of its sign.

For this thread, until `restore_mode(mode)`; a processor without this mode keeps denormals. Between the two, arithmetic
must read its operands from arrays and write its results to arrays; LLVM may move other arithmetic out.
"""


def _restored(typing: Any, mode: Any) -> Any:

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        end_flushing(builder, given[0])
        return context.get_dummy_value()

    return types.void(types.uint64), code


restore_mode: Any = intrinsic(_restored)
"""Within a loop, restore_mode(mode): end what `flush_denormals` began."""


def loop(*arrays: Vector) -> Callable[[Callable[..., Any]], Loop]:
    """Declare a loop that takes arrays of these types, then float32 scalars."""

    def declare(function: Callable[..., Any]) -> Loop:
        scalars = function.__code__.co_argcount - len(arrays)
        declared = Loop(function, *arrays, *["float32"] * scalars, sources=_SOURCES)
        LOOPS[function.__name__] = declared
        return declared

    return declare
