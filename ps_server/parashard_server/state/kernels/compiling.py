"""How the kernels' loops are declared, and the instructions that they have besides Numba's. Knows no loop."""

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

_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()

BLOCK_WORDS = 8
"""What a register of AVX has."""

LOOPS: dict[str, Loop] = {}
"""By name: those of `loops`, `row_loops` and `index_loops`."""
_SOURCES = tuple(Path(__file__).parent.glob("*.py"))


compiled_form_of: Any = overload
"""Declare what loops call in place of a function: @compiled_form_of(function) on what returns that."""


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
"""Within a loop, ahead(array, index): have the cache line of array[index] brought while the loop goes on."""


def _eight(typing: Any, tags: Any, index: Any) -> Any:

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        held = context.make_array(signature.args[0])(context, builder, given[0])
        return builder.load(builder.bitcast(builder.gep(held.data, [given[1]]), _INT64.as_pointer()), align=1)

    return types.uint64(tags, index), code


eight: Any = intrinsic(_eight)
"""Within a loop, eight(tags, index): eight of them as one number, the first in its lowest bits."""


def _lowest(typing: Any, bits: Any) -> Any:

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.cttz(given[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(bits), code


lowest: Any = intrinsic(_lowest)
"""Within a loop, lowest(bits): the number of the lowest bit that is set; there is one."""


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


def loop(*arrays: Vector) -> Callable[[Callable[..., Any]], Loop]:
    """Declare a loop that takes such arrays, then float32 scalars."""

    def declare(function: Callable[..., Any]) -> Loop:
        scalars = function.__code__.co_argcount - len(arrays)
        declared = Loop(function, *arrays, *["float32"] * scalars, sources=_SOURCES)
        LOOPS[function.__name__] = declared
        return declared

    return declare
