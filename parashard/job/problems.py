"""Problems: the validation errors of a job, one for each key: its origin, what was found and what is allowed.

Owns the translation of pydantic's errors into one `ConfigurationError`, the only form in which a user sees them. Knows
the schema only through its annotations. Called by `load`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from parashard.errors import ConfigurationError
from parashard.job.keys import at, dotted, key_parts, shown
from parashard.job.layers import Layers
from parashard.job.relations import Contradictions
from parashard.settings.forms import TAGS, description_of, forms_at, tag_values
from parashard.settings.table import Table

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
    "tuple_type": "a list",
}
"""Messages for pydantic's commonest errors, in a job file's terms; the others keep pydantic's own."""


def configuration_error(error: ValidationError, schema: type[Table], layers: Layers) -> ConfigurationError:
    """Return one error with one line for each problem."""
    lines: dict[str, list[str]] = {}  # several members of a union refuse the same value: one line, all alternatives
    for details in error.errors(include_url=False):
        for what, allowed in _problems(details, schema, layers):
            lines.setdefault(what, []).append(allowed)
    problems = [f"{what}; {' or '.join(dict.fromkeys(allowed))}" for what, allowed in lines.items()]
    if len(problems) == 1:
        return ConfigurationError(problems[0])
    return ConfigurationError(f"the job has {len(problems)} problems:\n" + "\n".join(f"  {p}" for p in problems))


def _problems(details: ErrorDetails, schema: type[Table], layers: Layers) -> Iterator[tuple[str, str]]:
    """Yield (where and what was found, what is allowed)."""
    kind, context = details["type"], details.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, Contradictions):
        for c in cause.found:
            here = key_parts(c.keys[0])
            if not c.keys[1]:
                yield f"{layers.named(here)}: found {shown(c.found[0])}", f"allowed: {c.allowed}"
                continue
            other = key_parts(c.keys[1])
            words = layers.words.get(c.keys[1])
            second = (
                f"{words} = {shown(c.found[1])}"
                if words
                else f"{c.keys[1]} = {shown(c.found[1])} ({layers.origin(other)})"
            )
            yield f"{layers.named(here)}: found {shown(c.found[0])} with {second}", f"allowed: {c.allowed}"
        return
    parts = _key(details["loc"], layers.table, keep_last=kind == "missing")
    if kind == "missing":
        needed = _descriptions_at(schema, parts[:-1], layers.table)[parts[-1]] or "a value"
        yield f"{layers.origin_of_missing(parts)}: {dotted(*parts)}: missing", f"needed: {needed}"
    elif kind == "extra_forbidden":
        yield f"{layers.named(parts)}: unknown key", _nearest(schema, parts, layers.table)
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        yield _unknown_member(schema, parts, layers)
    else:
        where = f"{layers.named(parts)}: found {shown(details['input'])}"
        yield where, f"allowed: {_phrase(kind, details['msg'], context)}"


def _phrase(kind: str, message: str, context: Mapping[str, Any]) -> str:
    if kind in _PHRASES:
        bounds = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in context.items()}
        return _PHRASES[kind].format_map(bounds)
    # The line has what was found already; validators of other packages may repeat it at the end.
    message = re.sub(r", found .*$", "", message, flags=re.DOTALL)
    return re.sub(r"^(Value error, |Input should be )(must be )?", "", message)


def _unknown_member(schema: type[Table], parts: tuple[str, ...], layers: Layers) -> tuple[str, str]:
    forms = forms_at(schema, parts, layers.table)
    tag = next(tag for tag in TAGS if all(tag in form.keys for form in forms))
    offered = [form for form in forms if not (getattr(form, "for_tests", False) or getattr(form, "of_scripts", False))]
    allowed = [value for form in offered for value in tag_values(form, tag)]
    node = at(layers.table, parts)
    key = (*parts, tag)
    if tag in node:
        return f"{layers.named(key)}: found {shown(node[tag])}", f"allowed: {', '.join(allowed)}"
    return f"{layers.origin_of_missing(key)}: {dotted(*key)}: missing", f"allowed: {', '.join(allowed)}"


def _nearest(schema: type[Table], parts: tuple[str, ...], table: Mapping[str, Any]) -> str:
    known = list(_descriptions_at(schema, parts[:-1], table))
    if parts[0] == "variables" and isinstance(at(table, parts), dict):
        return f"a pattern with a dot needs quotes: {dotted(parts[0], '.'.join(parts[1:]))}"
    near = difflib.get_close_matches(parts[-1], known, n=1)
    return f"did you mean {dotted(*parts[:-1], near[0])}?" if near else f"allowed: {', '.join(known)}"


def _key(location: tuple[Any, ...], table: Any, *, keep_last: bool) -> tuple[str, ...]:
    """Return the key of an error's location: pydantic also puts the tags of unions in it, which no table holds."""
    parts: list[str] = []
    node: Any = table
    for depth, part in enumerate(location, start=1):
        if (isinstance(node, dict) and part in node) or isinstance(node, list):
            node = node[part]
        elif not (keep_last and depth == len(location)):
            continue
        parts.append(str(part))
    return tuple(parts)


def _descriptions_at(schema: type[Table], parts: tuple[str, ...], table: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that the table at `parts` may have; with an unknown kind, those of every kind."""
    return {
        declared.in_file or name: description_of(form, name)
        for form in forms_at(schema, parts, table)
        for name, declared in form.keys.items()
    }
