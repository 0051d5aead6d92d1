"""Reading of a table of plain values without pydantic, whose import would dominate a service's start.

What is read is valid: `parashard.settings.validation` accepts it, and gives an equal table. What is refused here may be
valid all the same; the validation decides, and has the words for people. Called by `parashard.job.load` and by the
records of a store.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import EllipsisType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from parashard.settings.forms import forms_of, tables_in
from parashard.settings.table import After, Before, Key, Table

JSON_BYTES_MAX = 1 << 16
"""Longest text that is read without pydantic, which takes less time for a longer one, its import included."""

_Table = TypeVar("_Table", bound=Table)


def read_table(form: type[_Table], plain: Any) -> _Table:
    """Return the table of plain values, as JSON gives them.

    Raises
    ------
    ValueError
        If a key is missing or unknown, or a value is of another type or out of its bounds.
    """
    if type(plain) is not dict:
        raise ValueError(f"{form.__name__} is a table")
    left, values = dict(plain), {}
    for name, annotation in form.annotations().items():
        declared = form.keys[name]
        if (in_file := declared.in_file or name) in left:
            values[name] = _within(declared.bounds, _value(annotation, left.pop(in_file)))
        elif declared.needed:
            raise ValueError(f"{form.__name__} needs {name}")
    if left and not form.takes_any:
        raise ValueError(f"{form.__name__} has no {', '.join(left)}")
    table = form(**values, **left)
    table.check()
    return table


def read_json(form: type[_Table], text: bytes) -> _Table:
    """Return the table of a JSON text, validated by pydantic if it is long or cannot be read without.

    Raises
    ------
    ValueError
        If it is not valid; a pydantic.ValidationError.
    """
    if len(text) <= JSON_BYTES_MAX:
        with suppress(ValueError, RecursionError):
            plain = json.loads(text)
            json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()  # ValueError of half a character or NaN
            return read_table(form, plain)
    from parashard.settings.validation import validated_json

    return cast(_Table, validated_json(form, text))


def _value(annotation: Any, plain: Any) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1:], plain)
    if origin in (Union, UnionType):
        return _of_union(annotation, arguments, plain)
    if origin is tuple and type(plain) is list:
        kinds = [arguments[0]] * len(plain) if isinstance(arguments[-1], EllipsisType) else arguments
        return tuple(_value(kind, item) for kind, item in zip(kinds, plain, strict=True))
    if origin is dict and type(plain) is dict:
        return {_value(str, name): _value(arguments[1], below) for name, below in plain.items()}
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return read_table(annotation, plain)
    return _scalar(annotation, arguments if origin is Literal else (), plain)


def _scalar(annotation: Any, literals: tuple[Any, ...], plain: Any) -> Any:
    if annotation is float and type(plain) in (int, float):
        if not math.isfinite(plain):
            raise ValueError("not finite")
        return float(plain)
    if annotation in (str, Path) and type(plain) is str:
        plain.encode()  # ValueError of half a character
        return annotation(plain)
    is_literal = any(type(plain) is type(one) and plain == one for one in literals)
    if annotation is Any or is_literal or (annotation in (bool, int) and type(plain) is annotation):
        return plain
    raise ValueError(f"{plain!r} is no {annotation}")


def _annotated(kind: Any, items: tuple[Any, ...], plain: Any) -> Any:
    """Return a value of an annotated type; what is annotated first is nearest to the type."""
    before = [item for item in items if isinstance(item, Before)]
    for item in reversed(before):
        plain = item.check(plain)
    value = plain if before and before[0].whole else _value(kind, plain)
    for item in items:
        if isinstance(item, Key):
            value = _within(item.bounds, value)
        elif isinstance(item, After):
            value = item.check(value)
    return value


_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "ge": lambda value, bound: value >= bound,
    "gt": lambda value, bound: value > bound,
    "le": lambda value, bound: value <= bound,
    "lt": lambda value, bound: value < bound,
    "min_length": lambda value, bound: len(value) >= bound,
    "max_length": lambda value, bound: len(value) <= bound,
    "pattern": lambda value, bound: re.fullmatch(bound, value) is not None,
}


def _within(bounds: Mapping[str, Any], value: Any) -> Any:
    if value is not None and not all(_TESTS[name](value, bound) for name, bound in bounds.items()):
        raise ValueError(f"{value!r} is not within {bounds}")
    return value


def _of_union(annotation: Any, arguments: tuple[Any, ...], plain: Any) -> Any:
    if tables_in(annotation):
        forms = forms_of(annotation, plain)
        if len(forms) != 1:
            raise ValueError("a table of no kind")
        return read_table(forms[0], plain)
    for member in arguments:
        try:
            return None if plain is None and member is NoneType else _value(member, plain)
        except ValueError:
            continue
    raise ValueError(f"{plain!r} is none of {arguments}")
