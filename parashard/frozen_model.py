"""FrozenModel: base of models read from files and flags; and pydantic's errors in a job file's terms.

Checks are strict: "2" is not a number, and true is not 1. From JSON, lists become tuples and strings become paths.
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
    """Declare a field; `kw_only=False` tells type checkers that it may be a positional argument."""
    return Field(**of_field)


@dataclass_transform(kw_only_default=True, field_specifiers=(Field, setting))
class FrozenModel(BaseModel):
    """A frozen model that refuses unknown keys, values of another type and numbers that are not finite."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # undeclared keys, such as those of a user's model, may have infinity or NaN
        defer_build=True,  # until the first instance
        protected_namespaces=(),
    )

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with some fields replaced, without checking the new values."""
        return self.model_copy(update=changes)

    def plain(self) -> dict[str, Any]:
        """Return the values as JSON types, by their names in files."""
        return self.model_dump(mode="json", by_alias=True)


def validated(form: Any, plain: Any) -> Any:
    """Return plain values as a model or other annotated type; raise pydantic.ValidationError if they are invalid."""
    return _adapter(form).validate_json(json.dumps(plain, default=as_json), strict=True)


def as_json(value: Any) -> Any:
    """Convert a foreign number, such as NumPy's, to Python's, and any other value to text; for `json.dumps`."""
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else str(value)


@lru_cache(maxsize=64)
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def first_problem(error: ValueError) -> str:
    """Return the first problem of a `ValidationError`: its place, the value found and the values allowed."""
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
"""Allowed values for pydantic's most common errors, in a job file's terms; other errors keep pydantic's words."""


def allowed(details: ErrorDetails) -> str:
    """Return the values allowed where pydantic found an error, in words."""
    context: Mapping[str, Any] = details.get("ctx", {})
    if details["type"] in _PHRASES:
        bounds = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in context.items()}
        return _PHRASES[details["type"]].format_map(bounds)
    # The caller shows the value found; messages of validators may repeat it at the end.
    message = re.sub(r", found .*$", "", details["msg"], flags=re.DOTALL)
    return re.sub(r"^(Value error, |Input should be )(must be )?", "", message)
