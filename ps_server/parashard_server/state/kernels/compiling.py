"""Compilation of the kernels' loops by Numba into object files that need neither Numba nor Python to run.

Owns the declaration of a loop and what the machine code is entered by. Knows no loop. Numba is imported only where
this is: `parashard_server.state.kernels.machine_code` imports it where no earlier start left an object file.
"""

# Functions of Numba and llvmlite have no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from parashard_server.state.kernels.machine_code import ENTRY, REFUSED, Ndarray

VECTOR = types.Array(types.float32, 1, "C", aligned=False)
"""A gradient lies where its message does."""
SUMS = types.Array(types.float64, 1, "C", aligned=False)
KEYS = types.Array(types.uint64, 1, "C", aligned=False)
REFERENCES = types.Array(types.uint32, 1, "C", aligned=False)
TAGS = types.Array(types.uint8, 1, "C", aligned=False)
NUMBERS = types.Array(types.int64, 1, "C", aligned=False)

_INT32, _INT64, _FLOAT, _POINTER = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.PointerType()
_INSTRUCTIONS = {"sqrtf"}  # calls that become an instruction

BLOCK_WORDS = 8
"""What a register of AVX has."""

_LOOPS: dict[str, Any] = {}
_ARGUMENTS: dict[str, tuple[Any, ...]] = {}  # by loop
_VECTORS: dict[str, int] = {}  # by loop: how many of its first arguments have one length


def inlined(function: Callable[..., Any]) -> Any:
    """Declare a function that loops call."""
    return numba.njit(error_model="numpy")(function)


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


def loop(vectors: int, *buffers: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a loop that takes so many vectors of one length, then arrays of other lengths, then float32 scalars."""

    def declare(function: Callable[..., Any]) -> Any:
        arrays = (*[VECTOR] * vectors, *buffers)
        scalars = function.__code__.co_argcount - len(arrays)
        name = function.__name__
        _ARGUMENTS[name] = (*arrays, *[types.float32] * scalars)
        _VECTORS[name] = vectors
        _LOOPS[name] = numba.njit(nogil=True, error_model="numpy")(function)
        return _LOOPS[name]

    return declare


def arguments_of(name: str) -> tuple[list[np.dtype[Any]], int]:
    """Return the dtypes of the arrays that a loop takes, and the number of its scalars."""
    kinds = _ARGUMENTS[name]
    arrays = [np.dtype(str(kind.dtype)) for kind in kinds if isinstance(kind, types.Array)]
    return arrays, len(kinds) - len(arrays)


def object_file(name: str) -> bytes:
    """Return the object file of a loop, for the CPU of this process.

    Its only function is `int64 ENTRY(ndarray *array, ..., const float *scalars)`, which does not touch Python. It
    returns REFUSED, having done nothing, if an array has not one dimension or is not contiguous with the loop's element
    size, or if the vectors differ in length; otherwise what the loop returns, 0 for None.

    Raises
    ------
    AssertionError
        If the loop needs anything outside the file, such as Numba's memory or a Python exception.
    """
    argument_types, declared = _ARGUMENTS[name], _LOOPS[name]
    declared.compile(argument_types)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(declared.inspect_llvm(argument_types))
    compiled = declared.overloads[argument_types].fndesc.llvm_func_name
    module.link_in(llvm.parse_assembly(str(_entry(compiled, argument_types, _VECTORS[name]))))
    for function in module.functions:
        if not function.is_declaration and function.name != ENTRY:
            function.linkage = "internal"  # inlined, or dropped with all that it refers to
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="large",  # sections may lie anywhere: tables reserve far more addresses than 32 bits reach
    )
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    outside = {function.name for function in module.functions if function.is_declaration}
    needed = sorted(name for name in outside - _INSTRUCTIONS if not name.startswith("llvm."))
    assert not needed, f"the loop {name} calls {', '.join(needed)}"
    return bytes(machine.emit_object(module))


def _entry(compiled: str, argument_types: tuple[Any, ...], vectors: int) -> ir.Module:
    """Return the module with ENTRY, which calls Numba's function.

    That takes room for its result and for an exception, and an array as (owner, parent, elements, element bytes, data,
    length, stride): "Notes on Numba's calling convention" in its developer manual.
    """
    arrays = [kind for kind in argument_types if isinstance(kind, types.Array)]
    module = ir.Module()
    entry = ir.Function(module, ir.FunctionType(_INT64, [_POINTER] * (len(arrays) + 1)), ENTRY)
    block = ir.IRBuilder(entry.append_basic_block())

    def load(base: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
        at = block.gep(base, [_INT64(offset)], source_etype=ir.IntType(8))
        return block.load(at, align=1, typ=kind)

    def require(found: ir.Value, expected: ir.Value) -> None:
        with block.if_then(block.icmp_signed("!=", found, expected)):
            block.ret(_INT64(REFUSED))

    passed: list[ir.Value] = []
    lengths: list[ir.Value] = []
    for array, kind in zip(entry.args, arrays, strict=False):
        item_bytes = _INT64(kind.dtype.bitwidth // 8)
        require(load(array, Ndarray.dimensions.offset, _INT32), _INT32(1))
        length = load(load(array, Ndarray.shape.offset, _POINTER), 0, _INT64)
        stride = load(load(array, Ndarray.strides.offset, _POINTER), 0, _INT64)
        several = block.icmp_signed(">", length, _INT64(1))  # the stride of fewer elements means nothing
        require(block.select(several, stride, item_bytes), item_bytes)
        if 0 < len(lengths) < vectors:
            require(length, lengths[0])
        lengths.append(length)
        data = load(array, Ndarray.data.offset, _POINTER)
        passed += [_POINTER(None), _POINTER(None), length, item_bytes, data, length, item_bytes]
    scalars = len(argument_types) - len(arrays)
    passed += [load(entry.args[-1], 4 * number, _FLOAT) for number in range(scalars)]
    result, exception = block.alloca(_INT64), block.alloca(_POINTER)
    block.store(_INT64(0), result)
    signature = ir.FunctionType(_INT32, [value.type for value in (result, exception, *passed)])
    block.call(ir.Function(module, signature, compiled), [result, exception, *passed])
    block.ret(block.load(result, typ=_INT64))
    return module
