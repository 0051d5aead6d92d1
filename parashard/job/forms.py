"""Forms: which models can be at each key of a job file, by the annotations of `Job`.

A table has several forms where a key, `kind` or `source`, chooses among them.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from parashard.frozen_model import FrozenModel

USERS_FORM = "module:factory"
"""The tag of the form that takes any value with a colon, and any other key; shown in messages."""

TAGS = ("kind", "source")
"""The keys that choose among the forms of a table."""

Form = type[FrozenModel]


def tag_values(form: Form, tag: str) -> tuple[str, ...]:
    """Return the values of a tag that mean this form."""
    annotation = form.model_fields[tag].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else (USERS_FORM,)


def takes_any(form: Form) -> bool:
    """Whether it has keys besides those that are declared."""
    return form.model_config.get("extra") == "allow"


def fields_by_key(form: Form) -> dict[str, Any]:
    """Return the fields by their names in files."""
    return {field.alias or name: field for name, field in form.model_fields.items()}


def forms_in(annotation: Any) -> list[Form]:
    """Return the models that an annotation can be, in its order; not what a dict holds."""
    if isinstance(annotation, type) and issubclass(annotation, FrozenModel):
        return [annotation]
    if get_origin(annotation) in (dict, tuple):
        return []
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        arguments = arguments[:1]
    return [form for argument in arguments if argument is not NoneType for form in forms_in(argument)]


def forms_at(schema: Form, parts: tuple[str, ...], table: Any) -> list[Form]:
    """Return what the table at `parts` can be, of its kind where the whole table tells, else of every kind."""
    annotations: list[Any] = [schema]
    for part in parts:
        below: list[Any] = []
        for annotation in annotations:
            if get_origin(annotation) is dict:
                below.append(get_args(annotation)[1])
            for form in _forms_of(annotation, table):
                field = fields_by_key(form).get(part)
                below += [] if field is None else [field.annotation]
        annotations, table = below, table.get(part, {}) if isinstance(table, dict) else {}
    return [form for annotation in annotations for form in _forms_of(annotation, table)]


def _forms_of(annotation: Any, table: Any) -> list[Form]:
    """Return the forms of an annotation that a plain table can be: those of its kind, or all if it is of none."""
    forms = forms_in(annotation)
    return [form for form in forms if _is_kind(form, table)] or forms


def _is_kind(form: Form, table: Any) -> bool:
    tags = [tag for tag in TAGS if tag in form.model_fields]
    return isinstance(table, dict) and any(tag in table and means(form, tag, table[tag]) for tag in tags)


def means(form: Form, tag: str, value: Any) -> bool:
    """Whether a value of a tag chooses this form."""
    return (takes_any(form) and ":" in str(value)) or value in tag_values(form, tag)
