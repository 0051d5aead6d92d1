"""FrozenModel: strict, frozen, written as JSON has it; and what is said of a value that is not allowed."""

from __future__ import annotations

import math
from typing import Annotated

import pytest
from pydantic import ConfigDict, Field, ValidationError, model_validator

from parashard.frozen_model import FrozenModel, first_problem, validated

Small = Annotated[int, Field(ge=0, le=9, description="A small number.")]


class Pair(FrozenModel):
    least: Small
    most: Small = 9
    extra: tuple[float, ...] = Field(default=(), max_length=2, alias="further_numbers")

    @model_validator(mode="after")
    def _check(self) -> Pair:
        if self.least > self.most:
            raise ValueError("must be at most most")
        return self


class Open(FrozenModel):
    model_config = ConfigDict(extra="allow")

    kind: str


def test_a_model_is_written_as_it_is_read() -> None:
    pair = validated(Pair, {"least": 1, "further_numbers": [1, 2.5]})
    assert pair.extra == (1.0, 2.5)
    assert pair.plain() == {"least": 1, "most": 9, "further_numbers": [1.0, 2.5]}
    assert validated(Pair, pair.plain()) == pair


def test_a_copy_has_the_keys_that_are_not_declared_too() -> None:
    model = Open(kind="x", **{"depth": 3})
    assert model.replaced(kind="y").plain() == {"kind": "y", "depth": 3}
    assert model.plain() == {"kind": "x", "depth": 3}


def test_no_model_can_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Pair(least=1).least = 2


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"least": 10}, "least: found 10; allowed: <= 9"),
        ({"least": "1"}, 'least: found "1"; allowed: an integer'),
        ({"least": True}, "least: found true; allowed: an integer"),
        ({"least": 1.0}, "least: found 1.0; allowed: an integer"),
        ({}, "least: missing"),
        ({"least": 1, "extra": []}, "extra: unknown key"),
        ({"least": 5, "most": 4}, 'found {"least": 5, "most": 4}; allowed: at most most'),
        ({"least": 1, "further_numbers": 3}, "further_numbers: found 3; allowed: a list"),
        ({"least": 1, "further_numbers": [1, 2, 3]}, "further_numbers: found [1, 2, 3]; allowed: a list of at most 2"),
        ({"least": 1, "further_numbers": [math.nan]}, "further_numbers.0: found NaN; allowed: a finite number"),
    ],
)
def test_what_is_not_allowed_is_named(plain: object, said: str) -> None:
    with pytest.raises(ValidationError) as error:
        validated(Pair, plain)
    assert first_problem(error.value) == said
