"""Validation of settings that a user wrote or a file has, by pydantic; the only file here that imports it.

Owns how a table becomes pydantic's schema. Values are read as JSON, strictly: lists become tuples and text becomes
paths, but "2" is no number and true is not 1. Called by `parashard.job.load`, and by pydantic for the tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, cast, get_args

from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from parashard.settings.forms import USERS_FORM, tag_values
from parashard.settings.table import Table


def validated(form: Any, plain: Any) -> Any:
    """Return a table, or another annotated type, made of plain values.

    Raises
    ------
    pydantic.ValidationError
        If it is not valid.
    """
    return validated_json(form, json.dumps(plain, default=str).encode())


def validated_json(form: Any, text: bytes) -> Any:
    """Return the same of a JSON text."""
    return _adapter(form).validate_json(text, strict=True)


def first_problem(error: ValueError) -> str:
    """Return the first problem of a `ValidationError`: where, and what."""
    assert isinstance(error, ValidationError)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def wrong_keys(form: Any, plain: Any) -> list[str]:
    """Return the keys of a table whose values are not allowed."""
    try:
        validated(form, plain)
    except ValidationError as error:
        return [str(one["loc"][0]) for one in error.errors()]
    return []


@lru_cache(maxsize=64)
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def table_of(table: type[Table], handler: GetCoreSchemaHandler) -> CoreSchema:
    """Return the schema of a table."""
    fields = {}
    for name, annotation in table.annotations().items():
        declared = table.keys[name]
        schema = handler.generate_schema(Annotated[annotation, declared])
        if not declared.needed:
            schema = core_schema.with_default_schema(schema, default_factory=declared.value)
        fields[declared.in_file or name] = core_schema.typed_dict_field(schema, required=declared.needed)
    names = {declared.in_file: name for name, declared in table.keys.items() if declared.in_file}
    made = core_schema.typed_dict_schema(
        fields,
        extra_behavior="allow" if table.takes_any else "forbid",
        config=core_schema.CoreConfig(allow_inf_nan=False),
    )
    return core_schema.no_info_after_validator_function(partial(_made, table, names), made)


def _made(table: type[Table], names: Mapping[str, str], values: dict[str, Any]) -> Table:
    made = table(**{names.get(name, name): value for name, value in values.items()})
    made.check()
    return made


def bounded(schema: CoreSchema, bounds: Mapping[str, Any]) -> CoreSchema:
    """Return a schema with bounds, which its type must have: they apply to what is not None."""
    if not bounds:
        return schema
    changed: Any = dict(schema)
    if changed["type"] in ("nullable", "default", "function-before", "function-after"):
        changed["schema"] = bounded(changed["schema"], bounds)
        return cast(CoreSchema, changed)
    assert changed["type"] in ("int", "float", "str", "tuple"), f"bounds of {changed['type']}"
    changed.update(bounds)
    if "pattern" in bounds:
        changed["pattern"] = rf"^(?:{bounds['pattern']})\z"  # as `re.fullmatch`
    return cast(CoreSchema, changed)


def checked_before(check: Callable[[Any], Any], schema: CoreSchema) -> CoreSchema:
    """Return a schema with a function before it."""
    return core_schema.no_info_before_validator_function(check, schema)


def checked_after(check: Callable[[Any], Any], schema: CoreSchema) -> CoreSchema:
    """Return a schema with a function after it."""
    return core_schema.no_info_after_validator_function(check, schema)


def checked_whole(check: Callable[[Any], Any]) -> CoreSchema:
    """Return a schema that is a function."""
    return core_schema.no_info_plain_validator_function(check)


def one_of(union: Any, by: str, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Return the schema of a union of tables that are told apart by a key."""
    choices = {value: handler.generate_schema(table) for table in get_args(union) for value in tag_values(table, by)}
    if USERS_FORM not in choices:
        return core_schema.tagged_union_schema(choices, discriminator=by)

    def tag(plain: Any) -> str:
        value = str(plain.get(by, "") if isinstance(plain, dict) else getattr(plain, by, ""))
        return USERS_FORM if ":" in value else value

    return core_schema.tagged_union_schema(choices, discriminator=tag)
