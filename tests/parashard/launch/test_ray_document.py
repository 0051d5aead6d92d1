"""docs/ray.md: `ps` has what its programs call, with these arguments."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

import parashard as ps
from support.command_run import ROOT

PAGE = (ROOT / "docs" / "ray.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_page_calls_what_there_is(program: str) -> None:
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    ours = [call for call in calls if ast.unparse(call.func).startswith("ps.")]
    assert ours
    for call in ours:
        called = eval(ast.unparse(call.func), {"ps": ps})  # noqa: S307  # a name of our own page
        inspect.signature(called).bind(*call.args, **{str(word.arg): None for word in call.keywords})
        if called in (ps.Ray, ps.ParameterServerStrategy):
            eval(ast.unparse(call), {"ps": ps, "where": ps.Ray()})  # noqa: S307
