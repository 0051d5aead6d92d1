"""The update rules as CUDA kernels, by CuPy: the signatures of `fused`, on vectors of a GPU.

Launches on the calling thread's current device and stream; knows no shard.

Each element goes through the operations of its rule in their order, with one rounding each: no contraction of a
product and a sum into one (`--fmad=false`), denormals flushed to zero (`--ftz=true`, which CuPy always adds), and
NVRTC's defaults for the rest, which are correctly rounded division and square root. LAMB's norms are added block by
block, in index order. So the bits should be those of `fused`, on any GPU; a test marked `gpu` compares them. A rule's
lines are translated to CUDA C++: only syntax with the same meaning and order in both languages is accepted.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from parashard.plan.state import AVERAGE, COUNTER, COUNTER_BYTES, average_factor
from parashard.process import cuda
from parashard.process.cuda_code import elementwise
from parashard_server.state.kernels import rules
from parashard_server.state.kernels.rules import RULES, Values
from parashard_server.state.kernels.scalars import BLOCK_ELEMENTS, trust_ratio

Resident = Any  # a flat vector of float32 on the device

_f32 = np.float32
_LARGEST = repr(float(np.finfo(np.float32).max))


Where = tuple[Resident, int]
"""Mask of the elements of a call's vectors: those at which the vector of uint8 equals the number."""


def update(
    rule: str,
    values: Values | None,
    weights: Resident,
    gradient: Resident,
    *slots: Resident,
    where: Where | None = None,
) -> None:
    """See `fused.update`. LAMB synchronises for its norms, and allocates a vector of the variable's size."""
    if values is None:
        return
    if rule == "lamb":
        assert where is None, "LAMB moves a variable by its norms"
        _lamb(values, weights, gradient, *slots)
    else:
        scalars = _rounded(values, *RULES[rule].scalars)
        _elementwise(rule, where is not None)(*_of(where), gradient, *scalars, weights, *slots)


def decay(weights: Resident, share: float, *, where: Where | None = None) -> None:
    """See `fused.decay`."""
    kernel = _compiled("decay", _floats("share"), _floats("w"), "w = decayed(w, share);", where is not None)
    kernel(*_of(where), _f32(share), weights)


def move(weights: Resident, pushed: Resident, state: str, pushes: int, *, where: Where) -> None:
    """See `storage.move`; of a counter `where` marks only the first byte."""
    if state.startswith(AVERAGE):
        inputs = _floats("pushed", "share", "pushes")
        kernel = _compiled("average", inputs, _floats("w"), _AVERAGE, True)
        kernel(*_of(where), pushed, _f32(average_factor(state)), _f32(pushes), weights)
    elif state == COUNTER:
        kernel = _compiled("count", "raw float32 pushed", "raw float32 w", _COUNT, True)
        kernel(*_of(where), pushed, weights)
    else:
        kernel = _compiled("sum", _floats("pushed"), _floats("w"), "w = exact_sum(w, pushed);", True)
        kernel(*_of(where), pushed, weights)


def accumulate(total: Resident, gradient: Resident, *, first: bool) -> None:
    """Add a gradient to a sum; the first one as if to zeros: -0.0 becomes 0.0."""
    name, operation = ("begin", "w = exact_sum(g, 0.0f);") if first else ("accumulate", "w = exact_sum(w, g);")
    _compiled(name, _floats("g"), _floats("w"), operation)(gradient, total)


def is_finite(vector: Resident) -> bool:
    """See `fused.is_finite`; waits for the stream."""
    bad = cuda.namespace().zeros(1, np.int32)
    operation = f"if (!(fabsf(v) <= {_LARGEST}f)) bad[0] = 1;"  # NaN compares as false
    _compiled("not_finite", _floats("v"), "raw int32 bad", operation)(vector, bad)
    return not int(bad.get()[0])


def _lamb(values: Values, weights: Resident, gradient: Resident, m: Resident, v: Resident) -> None:
    rule, of_direction = RULES["lamb"], ("correction", "epsilon_t", "decay")
    to_direction = _compiled(
        "lamb_direction",
        _floats("gradient", *of_direction, *rule.scalars, "w"),
        _floats("m", "v", "u"),
        f"{_PREPARE}\n{statements(rule.step)}\nu = lamb_direction(w, m, v, correction, epsilon_t, decay);",
    )
    move = _compiled("lamb_move", _floats("u", "rate"), _floats("w"), "w -= rate * u;")
    u = cuda.namespace().empty_like(weights)
    to_direction(gradient, *_rounded(values, *of_direction, *rule.scalars), weights, m, v, u)
    move(u, _f32(values["learning_rate"] * trust_ratio(_squares_of_blocks(weights, u))), weights)


FUNCTIONS = """
__device__ float minimum(float a, float b) { return b < a ? b : a; }
__device__ float maximum(float a, float b) { return a < b ? b : a; }
__device__ float where(bool condition, float a, float b) { return condition ? a : b; }
"""
"""NaN stays NaN as in NumPy: fminf and fmaxf would return their other argument. b is never NaN."""


_WORDS = {"sqrt": "sqrtf", "ZERO": "0.0f"}
_SAME = (
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UnaryOp, ast.USub),
    *(ast.Compare, ast.Gt, ast.Lt, ast.Call, ast.Name, ast.Load),
)
"""Syntax with the same meaning, precedence and order in both languages."""


@functools.cache
def statements(rule: Callable[..., Any]) -> str:
    """Translate a rule's assignments; its arguments exist already, other names are declared."""
    *assignments, _ = _body(rule)
    known = set(rule.__code__.co_varnames[: rule.__code__.co_argcount])
    lines = []
    for assignment in assignments:
        assert isinstance(assignment, ast.Assign), ast.unparse(assignment)
        name = ast.unparse(assignment.targets[0])
        lines.append(f"{'' if name in known else 'float '}{name} = {_expression(assignment.value)};")
        known.add(name)
    return "\n".join(lines)


def device_function(function: Callable[..., Any]) -> str:
    """Translate a function of one expression."""
    (returned,) = _body(function)
    assert isinstance(returned, ast.Return), ast.unparse(returned)
    assert returned.value is not None
    arguments = ", ".join(f"float {name}" for name in function.__code__.co_varnames)
    return f"__device__ float {function.__name__}({arguments}) {{ return {_expression(returned.value)}; }}\n"


def _body(function: Callable[..., Any]) -> list[ast.stmt]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    return definition.body[1:]  # without the docstring


def _expression(expression: ast.expr) -> str:
    for node in ast.walk(expression):
        assert isinstance(node, _SAME), f"a rule may not have {ast.unparse(node)}"
        if isinstance(node, ast.Name):
            node.id = _WORDS.get(node.id, node.id)
    return ast.unparse(expression)


_COUNT = f"""
float carry = 0.0f;
for (int place = 0; place < {COUNTER_BYTES}; ++place) {{
    float column = w[i + place] + pushed[i + place] + carry;
    carry = floorf(column / 256.0f);
    w[i + place] = column - 256.0f * carry;
}}
"""
_AVERAGE = "w = exact_sum(w, exact_product(share, exact_difference(exact_quotient(pushed, pushes), w)));"
# Sums of gradients and of state, which are no update rules, use the exact functions: their denormals count.
_PREAMBLE = FUNCTIONS + "".join(
    device_function(function) for function in (rules.prepared, rules.lamb_direction, rules.decayed)
)
_PREPARE = "float g = prepared(gradient, w, weight_decay, clip, scale);"


@functools.cache
def _elementwise(rule: str, somewhere: bool) -> Any:
    """Return the kernel of a rule; its arguments are gradient, scalars, those of `prepared`, weights and slots."""
    slots, scalars = RULES[rule].slots, RULES[rule].scalars
    operation = f"{_PREPARE}\n{statements(RULES[rule].step)}"
    return _compiled(rule, _floats("gradient", *scalars), _floats("w", *slots), operation, somewhere)


def _floats(*names: str) -> str:
    return ", ".join(f"float32 {name}" for name in names)


def _rounded(values: Values, *names: str) -> list[np.float32]:
    return [_f32(values[name]) for name in names]


def _squares_of_blocks(weights: Resident, direction: Resident) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the squared norms of two vectors, block by block, on the host: shape (blocks, 2)."""
    kernel = _compiled(
        "squares_of_blocks",
        "raw float32 w, raw float32 u, int64 elements, int64 block_elements",
        "float64 of_w, float64 of_u",
        """
        long long stop = (i + 1) * block_elements;  // i is the block: one thread adds it up, in index order
        if (stop > elements) stop = elements;
        double ww = 0.0, uu = 0.0;
        for (long long j = i * block_elements; j < stop; ++j) {
            double a = w[j], b = u[j];
            ww += a * a;
            uu += b * b;
        }
        of_w = ww;
        of_u = uu;
        """,
    )
    squares = cuda.namespace().empty((2, -(-weights.size // BLOCK_ELEMENTS)), np.float64)
    kernel(weights, direction, weights.size, BLOCK_ELEMENTS, squares[0], squares[1])
    return np.ascontiguousarray(squares.get().T)


def _of(where: Where | None) -> tuple[Any, ...]:
    return () if where is None else (where[0], np.uint8(where[1]))


@functools.cache
def _compiled(name: str, inputs: str, outputs: str, operation: str, somewhere: bool = False) -> Any:
    """Return a kernel that applies an operation to each element; outputs are read and written in place."""
    # `somewhere`: only to elements of a `Where`, whose two parts come before the inputs.
    if somewhere:
        name, inputs = f"{name}_where", f"uint8 kind_here, uint8 kind_meant, {inputs}"
        operation = f"if (kind_here == kind_meant) {{\n{operation}\n}}"
    return elementwise(cuda.namespace(), name, inputs, outputs, operation, preamble=_PREAMBLE)
