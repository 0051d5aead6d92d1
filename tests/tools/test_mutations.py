"""Mutations: each is one small fault, has a name of its own, and what no test should tell is left alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutations import mutants_of

ROOT = Path(__file__).resolve().parents[2]


def changed(body: str) -> set[str]:
    """Return the body of a function with each fault that it could have had."""
    source = f"def f(self, x, y):\n    {body}\n"
    return {
        " ".join(mutant.applied_to(source.encode()).decode().partition("\n")[2].split())
        for mutant in mutants_of("m.py", source)
    }


@pytest.mark.parametrize(
    ("body", "faults"),
    [
        ("assert_(x < y)", {"assert_(x <= y)", "assert_(x >= y)", "pass"}),
        ("y = x == 3", {"y = x != 3", "y = x == 4", "y = x == 2"}),
        ("y = x and y", {"y = (x or y)", "y = (x)", "y = (y)"}),
        ("y = not x", {"y = (x)"}),
        ("y = x + y", {"y = (x - y)"}),
        ("y += x", {"pass", "y -= x"}),
        ("self.x = 0.5", {"pass", "self.x = 1.5"}),
        ("return min(x, y)", {"return max(x, y)", "return None"}),
        (
            "return x if y else 0",
            {"return (0 if y else x)", "return None", "return x if y else 1", "return x if y else (-1)"},
        ),
        ("if x: raise y", {"if not (x): raise y", "if False: raise y", "if x: pass"}),
        ("y = [i for i in x if i]", {"y = [i for i in x if True]"}),
    ],
)
def test_the_faults_of_a_line(body, faults):
    assert changed(body) == faults


def test_what_no_test_should_tell_is_left_alone():
    source = '''"""A text."""
LIMIT_S = 3.0
if TYPE_CHECKING:
    import x

@dataclass(frozen=True)
class Named:
    size: tuple[int, 2]

    def __init__(self, size: Literal[1] = 2) -> None:
        """Another."""
        self.size = size
        assert size > 0, "none"

    def named(self) -> str:
        why = f"{self.size + 1} of them"
'''
    assert mutants_of("m.py", source) == []


def test_a_switch_that_is_a_default_is_a_behaviour():
    (mutant,) = mutants_of("m.py", "def f(x: int = 3, *, y: bool = False): ...\n")
    assert (
        mutant.name == "f: `def f(x: int = 3, *, y: bool = False): ...` -> `def f(x: int = 3, *, y: bool = True): ...`"
    )


def test_a_name_stays_when_other_lines_change_and_twins_are_numbered():
    source = "class C:\n    def f(self):\n        del a\n        del a\n"
    names = [mutant.name for mutant in mutants_of("m.py", source)]
    assert names == ["C.f: `del a` -> `pass`", "C.f: `del a` -> `pass` (2)"]
    assert [mutant.name for mutant in mutants_of("m.py", f"import x\n\n{source}")] == names


def test_every_fault_of_a_real_file_is_another_program_with_a_name_of_its_own():
    source = (ROOT / "parashard/plan/intervals.py").read_text()
    mutants = mutants_of("intervals.py", source)
    assert len(mutants) > 50
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    programs = {ast.dump(ast.parse(mutant.applied_to(source.encode()))) for mutant in mutants}
    assert ast.dump(ast.parse(source)) not in programs
