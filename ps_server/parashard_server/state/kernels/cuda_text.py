"""The text of update rules in CUDA's C++: a rule's lines say the same there as in Python.

Only what has the same meaning and order in both is taken; see `parashard_server.state.kernels.rules`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

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
"""What has in both languages one meaning, precedence and order."""


@functools.cache
def statements(rule: Callable[..., Any]) -> str:
    """Return a rule's assignments; its arguments are there, other names are declared."""
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
    """Return a function of one expression."""
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
