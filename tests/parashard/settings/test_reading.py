"""Reading without pydantic: what is read is what validation gives, and what validation refuses is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from parashard.settings.reading import read_table
from parashard.settings.table import After, Before, OneOf, Table, key
from parashard.settings.validation import validated


class Left(Table):
    kind: Literal["left"] = key(default="left")
    path: Path


class Right(Table):
    kind: Literal["right"] = key(default="right")
    steps: int | Literal["all"] = "all"


class Other(Table):
    takes_any = True

    kind: str


def _even(number: int) -> int:
    if number % 2:
        raise ValueError("an even number")
    return number


def upper(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError("a word")
    return text.upper()


class Whole(Table):
    form: Annotated[Left | Right | Other, OneOf("kind")]
    rate: float = 0.5
    count: int = 1
    on: bool = False
    sizes: tuple[int, ...] = ()
    names: dict[str, Right] = key(default_factory=dict)
    word: Annotated[str, Before(upper, whole=True)] = "A"
    bound: float | None = key(default=None, gt=0)
    pair: tuple[str, int] | None = None
    digits: Annotated[str, key(pattern="[0-9]{2,3}", max_length=2)] = "00"
    even: Annotated[int, key(lt=100), After(_even)] = key(default=0, ge=-2)
    version: Literal[1] = 1
    identity: dict[str, Any] = key(default_factory=dict)

    def check(self) -> None:
        if self.count > 5 and self.on:
            raise ValueError("over five, and on")


GOOD: list[dict[str, Any]] = [
    {"form": {"kind": "left", "path": "/x"}},
    {"form": {"kind": "right", "steps": 3}, "rate": 2, "sizes": [1, 2], "bound": 1},
    {"form": {"kind": "right", "steps": "all"}, "names": {"*.bias": {"kind": "right"}}, "word": "up", "on": True},
    {"form": {"kind": "my:model", "depth": 3}},
    {"form": {"kind": "right"}, "pair": ["a", 1], "digits": "12", "even": -2, "version": 1, "identity": {"x": [None]}},
]


@pytest.mark.parametrize("plain", GOOD, ids=str)
def test_what_is_valid_is_read_as_validation_reads_it(plain: dict[str, Any]) -> None:
    table = read_table(Whole, plain)
    assert table == validated(Whole, plain)
    assert repr(table) == repr(validated(Whole, plain))  # 2.0 is not 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": {"kind": "left"}},
        {"form": {"kind": "up"}},
        {"form": {"path": "/x"}},
        {"form": 3},
        {},
        {"count": 1.0},
        {"count": True},
        {"on": 1},
        {"rate": "1"},
        {"rate": True},
        {"sizes": [1, "2"]},
        {"sizes": 1},
        {"names": {"x": 3}},
        {"bound": "x"},
        {"unknown": 1},
        {"bound": 0},
        {"bound": float("nan")},
        {"rate": float("inf")},
        {"pair": ["a"]},
        {"pair": ["a", 1, 1]},
        {"digits": "1"},
        {"digits": "123"},
        {"digits": "12\n"},
        {"even": 3},
        {"even": 100},
        {"even": -4},
        {"count": 6, "on": True},
    ],
    ids=str,
)
def test_what_is_of_another_form_is_refused(wrong: dict[str, Any]) -> None:
    plain = wrong if "form" in wrong or not wrong else {"form": {"kind": "right"}, **wrong}
    with pytest.raises(ValueError):
        read_table(Whole, plain)
    with pytest.raises(ValidationError):
        validated(Whole, plain)


@pytest.mark.parametrize("version", [True, 1.0])
def test_what_only_equals_a_literal_is_left_to_the_validation(version: Any) -> None:
    with pytest.raises(ValueError):
        read_table(Whole, {"form": {"kind": "right"}, "version": version})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 101) | st.floats() | st.sampled_from(["", "a", "12", "all", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "path", "x"]), inner),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(Whole.keys)), VALUES, max_size=3))
def test_whatever_is_read_is_valid(changed: dict[str, Any]) -> None:
    plain = {"form": {"kind": "right"}, **changed}
    try:
        table = read_table(Whole, plain)
    except ValueError:
        return
    assert repr(table) == repr(validated(Whole, plain))
