"""Tables: keys of their bases first, defaults, values, no change."""

from __future__ import annotations

from typing import Annotated, ClassVar

import pytest
from pydantic import ValidationError

from parashard.settings.forms import description_of
from parashard.settings.table import Table, key
from parashard.settings.validation import validated

Small = Annotated[int, key(ge=0, le=9, description="A small number.")]


class Base(Table):
    kind: str = key(default="base", description="Which.")
    least: Small


class Pair(Base):
    kind: str = key(default="pair", description="Which.")
    most: Small = 9
    extra: tuple[float, ...] = key(default=(), max_length=2, in_file="further_numbers")
    hidden: ClassVar[int] = 3

    def check(self) -> None:
        if self.least > self.most:
            raise ValueError("least is over most")


class Open(Table):
    takes_any = True

    kind: str = key(default="open", description="Which.")


def test_keys_are_in_order_and_have_their_defaults() -> None:
    assert list(Pair.keys) == ["kind", "least", "most", "extra"]
    assert Pair(least=2).plain() == {"kind": "pair", "least": 2, "most": 9, "further_numbers": ()}
    assert description_of(Pair, "most") == "A small number."


def test_equal_values_are_equal_tables_and_no_other() -> None:
    assert Pair(least=1) == Pair(least=1, most=9)
    assert hash(Pair(least=1)) == hash(Pair(least=1))
    assert Pair(least=1) != Pair(least=2)
    assert Base(kind="pair", least=1) != Open(kind="pair")


def test_a_copy_has_the_further_keys_too() -> None:
    table = Open(kind="x", **{"depth": 3})
    copy = table.replaced(kind="y")
    assert copy.plain() == {"kind": "y", "depth": 3}
    assert copy.further == {"depth": 3}
    assert table.plain() == {"kind": "x", "depth": 3}


def test_no_table_can_be_changed() -> None:
    table = Pair(least=1)
    with pytest.raises(AttributeError, match="frozen"):
        table.least = 2  # type: ignore[misc]
    with pytest.raises(AttributeError, match="frozen"):
        del table.least


def test_a_table_has_its_keys_and_no_other() -> None:
    with pytest.raises(TypeError, match="needs least"):
        Pair()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no lest"):
        Pair(least=1, lest=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"least": 10}, "less than or equal to 9"),
        ({"least": "1"}, "valid integer"),
        ({"least": True}, "valid integer"),
        ({}, "Field required"),
        ({"least": 5, "most": 4}, "least is over most"),
        ({"least": 1, "further_numbers": [1, 2, 3]}, "at most 2 items"),
        ({"least": 1, "further_numbers": [float("nan")]}, "finite number"),
        ({"least": 1, "extra": []}, "Extra inputs are not permitted"),
    ],
)
def test_validation_refuses_what_is_not_allowed(plain: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        validated(Pair, plain)


def test_validation_makes_a_table() -> None:
    assert validated(Pair, {"least": 1, "further_numbers": [1, 2.5]}) == Pair(least=1, extra=(1.0, 2.5))
