"""docs/ray.md: `ps` has what its programs call, with these arguments; each job has what it needs on several nodes."""

from __future__ import annotations

import ast
import inspect
import re
import shlex

import pytest

import parashard as ps
from support.command_run import ROOT

PAGE = (ROOT / "docs" / "ray.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^ *\$ (.*parashard run .*--on ray.*)", PAGE, re.MULTILINE)


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


def test_what_the_page_starts_on_ray_may_listen_off_loopback_and_has_a_store_of_all_nodes() -> None:
    assert len(COMMANDS) > 2
    for command in COMMANDS:
        words = shlex.split(command, comments=True)
        assert {"--tls-dir", "cluster.insecure=true"} & set(words), command
        assert any(word.startswith("checkpoint.url=/") for word in words), command
    on_ray = [program for program in PROGRAMS if "ps.Ray(" in program]
    assert len(on_ray) == 2
    for program in on_ray:
        assert re.search(r"ParameterServerStrategy\(.*\b(insecure=True|tls_dir=)", program), program
        assert '"checkpoint.url": "/' in program
