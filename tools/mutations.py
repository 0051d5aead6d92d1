"""Mutations: the small faults that a file of Python could have had, each as a replacement in its text.

Pure: text in, mutants out, in the order of the text. `tools/mutants.py` runs them.

Not mutated, since no unit test should tell the difference, are texts of messages (f-strings, string constants),
annotations, decorators, asserts, and numbers that are a choice under a name (module constants in capitals, defaults of
parameters): a test that knows the name agrees with any number.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
CALCULATED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
MADE_FIRST = ("__init__", "__post_init__")  # without an assignment there, every use of the object fails

_Edit = tuple[str, ast.AST, str]  # the kind, the node to replace, the text in its place


@dataclass(frozen=True)
class Mutant:
    """One replacement in one file.

    `name` is unique in the file and holds no line number, so that it is stable when other lines change: the kind, the
    function or class, the line before and the line after.
    """

    path: str
    name: str
    kind: str
    line: int
    begin: int
    end: int
    text: str

    def applied_to(self, source: bytes) -> bytes:
        """Return the file with this fault in it."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    content = source.encode()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: Counter[str] = Counter()
    found = []
    for where, (kind, node, text) in _walk(ast.parse(source), ""):
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        around = starts[node.lineno - 1], starts[node.end_lineno]
        before = _one_line(content[around[0] : around[1]])
        after = _one_line(content[around[0] : begin] + text.encode() + content[end : around[1]])
        name = f"{where}: `{before}` -> `{after}`"
        seen[name] += 1
        number = f" ({seen[name]})" if seen[name] > 1 else ""
        found.append(Mutant(path, name + number, kind, node.lineno, begin, end, text))
    return found


def _one_line(text: bytes) -> str:
    return " ".join(text.decode().split())


def _walk(node: ast.AST, where: str) -> Iterator[tuple[str, _Edit]]:
    """Yield every edit below a node, with the function or class that it is in."""
    if isinstance(node, ast.JoinedStr | ast.Assert) or (isinstance(node, ast.If) and _is_for_types(node)):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        where = f"{where}.{node.name}" if where else node.name
    for edit in _edits(node, where):
        yield where or "module", edit
    for child in _mutated_children(node, where):
        yield from _walk(child, where)


def _is_for_types(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _mutated_children(node: ast.AST, where: str) -> Iterator[ast.AST]:
    match node:
        case ast.FunctionDef():
            yield from filter(_is_switch, [*node.args.defaults, *filter(None, node.args.kw_defaults)])
            yield from node.body
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            if node.value is not None:
                yield node.value
        case ast.Assign(targets=[ast.Name(id=name)]) if not where and name.isupper() and _is_number(node.value):
            pass
        case _:
            yield from ast.iter_child_nodes(node)


def _is_number(value: ast.expr) -> bool:
    return not any(isinstance(part, ast.Name | ast.Call) for part in ast.walk(value))


def _is_switch(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, bool)


def _edits(node: ast.AST, where: str) -> Iterator[_Edit]:
    yield from _edits_of_expression(node)
    yield from _edits_of_statement(node, made_first=where.endswith(MADE_FIRST))


def _edits_of_expression(node: ast.AST) -> Iterator[_Edit]:
    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                for other in COMPARED[type(op)]:
                    ops = [*node.ops[:i], other(), *node.ops[i + 1 :]]
                    yield "comparison", node, ast.unparse(ast.Compare(node.left, ops, node.comparators))
        case ast.BoolOp():
            yield from _edits_of_conditions(node)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "negation", node, f"({ast.unparse(operand)})"
        case ast.BinOp() if type(node.op) in CALCULATED:
            calculated = ast.BinOp(node.left, CALCULATED[type(node.op)](), node.right)
            yield "arithmetic", node, f"({ast.unparse(calculated)})"
        case ast.Constant():
            yield from (("constant", node, text) for text in _other_constants(node.value))
        case ast.Call(func=ast.Name(id=name)) if name in CALLED:
            yield "call", node, ast.unparse(ast.Call(ast.Name(CALLED[name]), node.args, node.keywords))
        case ast.IfExp():
            yield "condition", node, f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
        case ast.comprehension():
            yield from (("dropped condition", test, "True") for test in node.ifs)


def _edits_of_conditions(node: ast.BoolOp) -> Iterator[_Edit]:
    turned = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "and, or", node, f"({ast.unparse(ast.BoolOp(turned, node.values))})"
    for i in range(len(node.values)):
        rest = [*node.values[:i], *node.values[i + 1 :]]
        kept = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        yield "dropped condition", node, f"({ast.unparse(kept)})"


def _other_constants(value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (str(not value),)
    if isinstance(value, int):
        return str(value + 1), str(value - 1) if value else "(-1)"
    return (str(value + 1.0),) if isinstance(value, float) else ()


def _edits_of_statement(node: ast.AST, *, made_first: bool) -> Iterator[_Edit]:
    match node:
        case ast.If():
            if not isinstance(node.test, ast.Compare | ast.UnaryOp):  # those are negated as expressions
                yield "condition", node.test, f"not ({ast.unparse(node.test)})"
            yield "condition", node.test, "True" if node.orelse else "False"
        case ast.While():
            yield "condition", node.test, "False"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "returned value", value, "None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            yield "dropped statement", node, "pass"
        case ast.Assign() if not made_first and not any(isinstance(t, ast.Name) for t in _targets(node)):
            yield "dropped statement", node, "pass"
        case _:
            pass
    if isinstance(node, ast.AugAssign) and type(node.op) in CALCULATED:
        other = ast.AugAssign(node.target, CALCULATED[type(node.op)](), node.value)
        yield "arithmetic", node, ast.unparse(other)


def _targets(node: ast.Assign) -> Iterator[ast.expr]:
    for target in node.targets:
        if isinstance(target, ast.Tuple):
            yield from target.elts
        else:
            yield target
