"""The update rules as loops, compiled by Numba into object files that need neither Numba nor Python to run.

Of the shard's modules only this one imports Numba, and `parashard_server.state.kernels.machine_code` imports it only
where no earlier start left an object file. A loop makes one pass over memory. It has the bits of the function of its
name in `parashard_server.state.kernels.reference`; its scalars come rounded to float32 from
`parashard_server.state.kernels.fused`.

No fastmath and no `parallel=True`: they let results depend on the division of a vector. Scalars are float32, for a
float64 would turn a whole expression into float64 and halve the vector width. Loops index: LLVM does not vectorise
Numba's iteration over an array. A loop takes no memory and raises nothing, for that would need Python. The machine code
is kept under the text of this file, so that a constant of another module must come in as an argument.
"""

# The loops take what Numba infers, by position: it resolves keywords in Python, and slowly.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types

from parashard_server.state.kernels.machine_code import ENTRY, REFUSED, Ndarray

_f32 = np.float32
_LARGEST = np.finfo(np.float32).max
_FINITE_BLOCK_ELEMENTS = 1 << 14  # is_finite stops at the end of the first block with a bad element
_VECTOR = types.Array(types.float32, 1, "C", aligned=False)  # a gradient lies where its message does
_SUMS = types.Array(types.float64, 1, "C", aligned=False)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {}  # by loop
_VECTORS: dict[str, int] = {}  # by loop: how many of its first arguments have one length

_INT32, _INT64, _FLOAT, _POINTER = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.PointerType()
_INSTRUCTIONS = {"sqrtf"}  # calls that become an instruction


def _inlined(function: Callable[..., Any]) -> Any:
    return numba.njit(error_model="numpy")(function)


def _loop(vectors: int, *buffers: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a loop that takes so many vectors of one length, then arrays of other lengths, then float32 scalars."""

    def declare(function: Callable[..., Any]) -> Any:
        arrays = (*[_VECTOR] * vectors, *buffers)
        scalars = function.__code__.co_argcount - len(arrays)
        _ARGUMENTS[function.__name__] = (*arrays, *[types.float32] * scalars)
        _VECTORS[function.__name__] = vectors
        return numba.njit(nogil=True, error_model="numpy")(function)

    return declare


@_inlined
def _prepared(gradient, weight, weight_decay, clip, scale):
    return min(max(gradient * scale, -clip), clip) + weight_decay * weight


@_loop(2)
def sgd(weights, gradient, learning_rate, weight_decay, clip, scale):
    for i in range(weights.size):
        weights[i] -= learning_rate * _prepared(gradient[i], weights[i], weight_decay, clip, scale)


@_loop(3)
def momentum(weights, gradient, velocity, learning_rate, mu, weight_decay, clip, scale):
    for i in range(weights.size):
        b = mu * velocity[i] + _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        velocity[i] = b
        weights[i] -= learning_rate * b


@_loop(3)
def nesterov(weights, gradient, velocity, learning_rate, mu, weight_decay, clip, scale):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        b = mu * velocity[i] + g
        velocity[i] = b
        weights[i] -= learning_rate * (g + mu * b)


@_loop(3)
def adagrad(weights, gradient, accumulator, learning_rate, epsilon, weight_decay, clip, scale):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        a = accumulator[i] + g * g
        accumulator[i] = a
        weights[i] -= learning_rate * g / (np.sqrt(a) + epsilon)


@_loop(3)
def rmsprop(weights, gradient, mean_square, learning_rate, rho, one_minus_rho, epsilon, weight_decay, clip, scale):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        s = rho * mean_square[i] + one_minus_rho * g * g
        mean_square[i] = s
        weights[i] -= learning_rate * g / (np.sqrt(s) + epsilon)


@_loop(4)
def adam(
    weights, gradient, m, v, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, weight_decay, clip,
    scale,
):  # fmt: skip
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], weight_decay, clip, scale)
        m_i = beta1 * m[i] + one_minus_beta1 * g
        v_i = beta2 * v[i] + one_minus_beta2 * g * g
        m[i] = m_i
        v[i] = v_i
        weights[i] -= step_size * m_i / (np.sqrt(v_i) + epsilon)


@_loop(4)
def adamw(
    weights, gradient, m, v, step_size, beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, shrink, clip, scale
):
    for i in range(weights.size):
        g = _prepared(gradient[i], weights[i], _f32(0.0), clip, scale)
        m_i = beta1 * m[i] + one_minus_beta1 * g
        v_i = beta2 * v[i] + one_minus_beta2 * g * g
        m[i] = m_i
        v[i] = v_i
        weights[i] -= step_size * m_i / (np.sqrt(v_i) + epsilon) + shrink * weights[i]


@_loop(4)
def ftrl(weights, gradient, z, n, reciprocal, beta, l1, l2, weight_decay, clip, scale):
    zero = _f32(0.0)
    for i in range(weights.size):
        w = weights[i]
        g = _prepared(gradient[i], w, weight_decay, clip, scale)
        n_i = n[i] + g * g
        root = np.sqrt(n_i)
        z_i = z[i] + (g - (root - np.sqrt(n[i])) * reciprocal * w)
        n[i] = n_i
        z[i] = z_i
        shrunk = z_i - l1 if z_i > l1 else (z_i + l1 if z_i < -l1 else zero)
        weights[i] = (zero - shrunk) / ((beta + root) * reciprocal + l2)


@_inlined
def _lamb_direction(m, v, weight, correction, epsilon, weight_decay):
    return correction * m / (np.sqrt(v) + epsilon) + weight_decay * weight


@_loop(4, _SUMS, _VECTOR)
def lamb_moments(
    weights, gradient, m, v, squares, direction, beta1, one_minus_beta1, beta2, one_minus_beta2, correction, epsilon,
    weight_decay, clip, scale,
):  # fmt: skip
    """Update m and v; for each block of `direction.size` elements put two sums into `squares`.

    These are the squared norms of weights and direction; `squares` has 2 * blocks elements, `direction` is scratch.
    """
    for block in range(squares.size // 2):
        run = slice(block * direction.size, (block + 1) * direction.size)
        w, g, m_run, v_run = weights[run], gradient[run], m[run], v[run]
        for i in range(w.size):
            g_i = _prepared(g[i], w[i], _f32(0.0), clip, scale)
            m_i = beta1 * m_run[i] + one_minus_beta1 * g_i
            v_i = beta2 * v_run[i] + one_minus_beta2 * g_i * g_i
            m_run[i] = m_i
            v_run[i] = v_i
            direction[i] = _lamb_direction(m_i, v_i, w[i], correction, epsilon, weight_decay)
        of_weights = of_direction = 0.0
        for i in range(w.size):  # apart, since a sum in index order cannot be vectorised
            of_weights += np.float64(w[i]) * np.float64(w[i])
            of_direction += np.float64(direction[i]) * np.float64(direction[i])
        squares[2 * block] = of_weights
        squares[2 * block + 1] = of_direction


@_loop(3)
def lamb_step(weights, m, v, correction, epsilon, weight_decay, rate):
    for i in range(weights.size):  # the direction again, rather than a scratch vector of the variable's size
        weights[i] -= rate * _lamb_direction(m[i], v[i], weights[i], correction, epsilon, weight_decay)


@_loop(2)
def accumulate(total, gradient):
    for i in range(total.size):
        total[i] += gradient[i]


@_loop(3)
def delay_compensated(gradient, weights, pulled, strength):
    for i in range(gradient.size):
        gradient[i] += strength * gradient[i] * gradient[i] * (weights[i] - pulled[i])


@_loop(1)
def is_finite(array):
    for begin in range(0, array.size, _FINITE_BLOCK_ELEMENTS):
        block = array[begin : begin + _FINITE_BLOCK_ELEMENTS]
        finite = True
        for i in range(block.size):  # without an exit, hence vectorised; NaN compares as false
            finite &= abs(block[i]) <= _LARGEST
        if not finite:
            return False
    return True


@_loop(2)
def copy(destination, source):
    for i in range(destination.size):
        destination[i] = source[i]


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
    argument_types, loop = _ARGUMENTS[name], globals()[name]
    loop.compile(argument_types)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(loop.inspect_llvm(argument_types))
    compiled = loop.overloads[argument_types].fndesc.llvm_func_name
    module.link_in(llvm.parse_assembly(str(_entry(compiled, argument_types, _VECTORS[name]))))
    for function in module.functions:
        if not function.is_declaration and function.name != ENTRY:
            function.linkage = "internal"  # inlined, or dropped with all that it refers to
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="small",
    )
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    declared = {function.name for function in module.functions if function.is_declaration}
    needed = sorted(name for name in declared - _INSTRUCTIONS if not name.startswith("llvm."))
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
