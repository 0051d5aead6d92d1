"""Functions are found again by module and name, or refused in a sentence that says why."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from parashard.api.programs.calls import Function, found, function, name_of, names_now
from parashard.errors import ConfigurationError


@function
def counts(weights: object, more: int = 1) -> tuple[int, dict[str, int]]:
    """Count."""
    return more, {}


@function(pushes=0)
def looks(weights: object) -> int:
    return 3


NAME = f"{__name__}:counts"


def test_a_marked_function_is_still_one() -> None:
    assert (counts(None, 4), looks(None)) == ((4, {}), 3)
    assert (counts.pushes, looks.pushes) == (1, 0)
    assert (counts.__name__, counts.__doc__) == ("counts", "Count.")  # type: ignore[attr-defined]


def test_it_is_found_by_its_name() -> None:
    assert name_of(counts, frozenset(), "it") == NAME
    assert found(NAME) is counts
    assert found(f"{__name__}:away") is None


def test_what_a_worker_would_not_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @function
    def inner(weights: object) -> None: ...

    for called, says in (
        (inner, "inner is not at the top level"),
        (function(lambda weights: 1), "<lambda> is not at the top level"),
        (Function(counts.called, 1), "has something else by the name counts"),
        (3, "it is a function with a name, found int"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            name_of(called, frozenset(), "it")


def test_what_the_script_defines_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    before = names_now()
    late = Function(counts.called, 1)
    late.__module__, late.__qualname__ = "__main__", "late"  # type: ignore[attr-defined]
    main.late = late  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"late is defined after ps.Coordinator\(...\)"):
        name_of(late, before, "it")
    assert name_of(late, names_now(), "it") == "__main__:late"


def test_it_pushes_once_or_not() -> None:
    with pytest.raises(ConfigurationError, match=r"pushes=2\): allowed is 1"):
        function(pushes=2)
