"""Forms: the type expected at each key of a table, derived from its annotations.

Called by what reads, checks and describes job files.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from parashard.settings.table import Key, Table

USERS_FORM = "module:factory"
"""The tag of a form that takes any value with a colon; shown in messages."""

TAGS = ("kind", "source")
"""The keys that choose among the forms of a table."""


def bare(annotation: Any) -> Any:
    """Return a type without what is annotated."""
    return bare(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def tag_values(form: type[Table], tag: str) -> tuple[str, ...]:
    """Return the values of a tag that mean this form."""
    return tuple(map(str, get_args(bare(form.annotations()[tag])))) or (USERS_FORM,)


def description_of(form: type[Table], name: str) -> str:
    """Return the description of a key: its own, or that of its type."""
    said = [item.description for item in annotated(form.annotations()[name]) if isinstance(item, Key)]
    return next(filter(None, [form.keys[name].description, *said]), "")


def annotated(annotation: Any) -> Iterator[Any]:
    """Yield what is annotated, here or within the type."""
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
    if get_origin(annotation) not in (Literal, None):
        for below in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
            yield from annotated(below)


def tables_in(annotation: Any) -> list[type[Table]]:
    """Return the tables that an annotation can be, in its order; not what a dict holds."""
    annotation = bare(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    if get_origin(annotation) in (dict, tuple):
        return []
    return [table for argument in get_args(annotation) if argument is not NoneType for table in tables_in(argument)]


def forms_at(schema: type[Table], parts: tuple[str, ...], table: Any) -> list[type[Table]]:
    """Return what the table at `parts` can be, of its kind where the whole table tells, else of every kind."""
    annotations: list[Any] = [schema]
    for part in parts:
        below: list[Any] = []
        for annotation in annotations:
            if get_origin(bare(annotation)) is dict:
                below.append(get_args(bare(annotation))[1])
            for form in forms_of(annotation, table):
                kinds = form.annotations()
                below += [kinds[name] for name, declared in form.keys.items() if (declared.in_file or name) == part]
        annotations, table = below, table.get(part, {}) if isinstance(table, dict) else {}
    return [form for annotation in annotations for form in forms_of(annotation, table)]


def file_keys(form: type[Table]) -> Iterator[tuple[str, Any]]:
    """Yield (name in files, declaration) of each key."""
    for name, declared in form.keys.items():
        yield declared.in_file or name, declared


def forms_of(annotation: Any, table: Any) -> list[type[Table]]:
    """Return the tables of an annotation that a plain table can be: those of its kind, or all if it is of none."""
    forms = tables_in(annotation)
    return [form for form in forms if _is_kind(form, table)] or forms


def _is_kind(form: type[Table], table: Any) -> bool:
    tags = [tag for tag in TAGS if tag in form.keys]
    return isinstance(table, dict) and any(tag in table and _means(form, tag, table[tag]) for tag in tags)


def _means(form: type[Table], tag: str, value: Any) -> bool:
    return (form.takes_any and ":" in str(value)) or value in tag_values(form, tag)
