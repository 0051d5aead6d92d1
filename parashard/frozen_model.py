"""FrozenModel: the base of what is read from files and flags; and pydantic's errors in a job file's words.

A model is declared once; pydantic checks and writes it. Checks are strict: "2" is no number, and true is not 1. From
JSON, lists become tuples and texts become paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Self, dataclass_transform

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from parashard.errors import shortened


def setting(*, kw_only: bool, **of_field: Any) -> Any:
    """Declare a field; `kw_only=False` tells type checkers that it may be given without its name."""
    return Field(**of_field)


@dataclass_transform(kw_only_default=True, field_specifiers=(Field, setting))
class FrozenModel(BaseModel):
    """A frozen model that takes no unknown key, no value of another type and no number that is not finite."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # of keys that are not declared, such as those of a user's model
        defer_build=True,  # until a model is made for the first time
        protected_namespaces=(),
    )

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields, which are not checked."""
        return self.model_copy(update=changes)

    def plain(self) -> dict[str, Any]:
        """Return the values as JSON has them, by their names in files."""
        return self.model_dump(mode="json", by_alias=True)


def validated(form: Any, plain: Any) -> Any:
    """Return a model, or another annotated type, made of plain values, or raise pydantic.ValidationError."""
    return _adapter(form).validate_json(json.dumps(plain, default=as_json), strict=True)


def as_json(value: Any) -> Any:
    """Return a number that is not Python's as one that is, and any other value as text: for `json.dumps`."""
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else str(value)


@lru_cache(maxsize=64)
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def first_problem(error: ValueError) -> str:
    """Return the first problem of a `ValidationError`: where, what was found and what is allowed."""
    assert isinstance(error, ValidationError)
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] in ("missing", "extra_forbidden"):
        return f"{where}: {'missing' if first['type'] == 'missing' else 'unknown key'}"
    found = shortened(json.dumps(first["input"], default=as_json))
    return f"{f'{where}: ' if where else ''}found {found}; allowed: {allowed(first)}"


_PHRASES = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "int_type": "an integer",
    "less_than": "< {lt}",
    "less_than_equal": "<= {le}",
    "list_type": "a list",
    "model_attributes_type": "a table",
    "model_type": "a table",
    "string_type": "text",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
    "tuple_type": "a list",
    "union_tag_invalid": "{expected_tags}",
}
"""What each of pydantic's commonest errors allows, in a job file's terms; the others keep pydantic's own words."""


def allowed(details: ErrorDetails) -> str:
    """Return what is allowed where pydantic found an error."""
    context: Mapping[str, Any] = details.get("ctx", {})
    if details["type"] in _PHRASES:
        bounds = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in context.items()}
        return _PHRASES[details["type"]].format_map(bounds)
    # What was found is said already; messages of validators may repeat it at the end.
    message = re.sub(r", found .*$", "", details["msg"], flags=re.DOTALL)
    return re.sub(r"^(Value error, |Input should be )(must be )?", "", message)
