"""Validation of a job's table: each problem with its origin, what was found and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from parashard.errors import ConfigurationError
from parashard.frozen_model import allowed, validated
from parashard.job.keys import at, dotted, key_parts, leaves, shown
from parashard.job.layers import TAGS, Form, Layers, fields_by_key, forms_at, means, tag_values, takes_any

_RANKS = ("file", "environment", "flag")


Relation = tuple[str, str, str]
"""Two keys that contradict each other, or an impossible one and "", and the allowed values of the first."""


class Contradictions(ValueError):
    """All relations that a job, or one of its tables, breaks; pydantic carries it to `validated_layers`."""

    def __init__(self, model: Any, broken: list[Relation]) -> None:
        super().__init__("; ".join(f"{key} with {other}: allowed: {allowed}" for key, other, allowed in broken))
        self.model, self.broken = model, broken


def check_relations(model: Any, broken: Iterable[Relation]) -> None:
    """Raise the relations that a model breaks, if there are any."""
    if found := list(broken):
        raise Contradictions(model, found)


def _value(model: Any, key: str) -> Any:
    value = model
    for part in key_parts(key):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return sorted(value) if isinstance(value, dict) else value


def validated_layers(form: Any, layers: Layers) -> Any:
    """Return the model that a table with origins describes."""
    try:
        return validated(form, layers.table)
    except ValidationError as error:
        found = error
    lines: dict[str, list[str]] = {}  # several members of a union refuse the same value: one line, all alternatives
    for details in found.errors(include_url=False):
        for what, allows in _problems(details, form, layers):
            lines.setdefault(what, []).append(allows)
    problems = [f"{what}; {' or '.join(dict.fromkeys(allows))}" for what, allows in lines.items()]
    if len(problems) == 1:
        raise ConfigurationError(problems[0])
    raise ConfigurationError(f"the job has {len(problems)} problems:\n" + "\n".join(f"  {p}" for p in problems))


def validated_words(form: Any, plain: Mapping[str, Any], words: str) -> Any:
    """Return the model of a table that a script gives; errors name a key after `words`."""
    named = {dotted(*parts): words + dotted(*parts) for parts, _ in leaves(plain)}
    return validated_layers(form, Layers(words.rstrip(": ."), plain, named))


def _problems(details: ErrorDetails, schema: Any, layers: Layers) -> Iterator[tuple[str, str]]:
    """Yield (where and what was found, what is allowed)."""
    kind, cause = details["type"], details.get("ctx", {}).get("error")
    parts = _key(details["loc"], layers.table, keep_last=kind == "missing")
    if isinstance(cause, Contradictions):
        yield from _contradictions(cause, parts, layers)
        return
    if kind == "missing":
        needed = _descriptions_at(schema, parts[:-1], layers.table)[parts[-1]] or "a value"
        yield f"{layers.origin_of_missing(parts)}: {dotted(*parts)}: missing", f"needed: {needed}"
    elif kind == "extra_forbidden":
        yield f"{layers.named(parts)}: unknown key", _nearest(schema, parts, layers.table)
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        yield _unknown_member(schema, parts, layers)
    else:
        yield f"{layers.named(parts)}: found {shown(details['input'])}", f"allowed: {allowed(details)}"


def _contradictions(cause: Contradictions, above: tuple[str, ...], layers: Layers) -> Iterator[tuple[str, str]]:
    for key, other_key, allows in cause.broken:
        found = f"{layers.named((*above, *key_parts(key)))}: found {shown(_value(cause.model, key))}"
        if other_key:
            other = (*above, *key_parts(other_key))
            words = layers.words.get(dotted(*other))
            origin = "" if words else f" ({layers.origin(other)})"
            found += f" with {words or dotted(*other)} = {shown(_value(cause.model, other_key))}{origin}"
        yield found, f"allowed: {allows}"


def _unknown_member(schema: Any, parts: tuple[str, ...], layers: Layers) -> tuple[str, str]:
    forms = forms_at(schema, parts, layers.table)
    tag = next(tag for tag in TAGS if all(tag in form.model_fields for form in forms))
    offered = [form for form in forms if not (getattr(form, "for_tests", False) or getattr(form, "of_scripts", False))]
    values = [value for form in offered for value in tag_values(form, tag)]
    node = at(layers.table, parts)
    key = (*parts, tag)
    if tag in node:
        return f"{layers.named(key)}: found {shown(node[tag])}", f"allowed: {', '.join(values)}"
    return f"{layers.origin_of_missing(key)}: {dotted(*key)}: missing", f"allowed: {', '.join(values)}"


def _nearest(schema: Any, parts: tuple[str, ...], table: Mapping[str, Any]) -> str:
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
        if (isinstance(node, dict) and part in node) or (isinstance(node, list) and isinstance(part, int)):
            node = node[part]
        elif not (keep_last and depth == len(location)):
            continue
        parts.append(str(part))
    return tuple(parts)


def _descriptions_at(schema: Any, parts: tuple[str, ...], table: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that the table at `parts` may have; with an unknown kind, those of every kind."""
    forms = forms_at(schema, parts, table)
    return {key: field.description or "" for form in forms for key, field in fields_by_key(form).items()}


# --- a table whose kind a later layer changes ---


def drop_keys_of_earlier_kinds(layers: Layers, schema: Form) -> None:
    """Remove keys that only an overridden kind of their table has, and that come from below the present kind."""
    # A job file that reads a CSV has keys that the source `digits` lacks: `--set data.source=digits` drops them. Keys
    # of both kinds stay; keys that are given together with the new kind, or after it, are validated as usual.
    for tag, earlier in list(layers.replaced.items()):
        if tag[-1] not in TAGS or tag not in layers.origins:
            continue
        forms = forms_at(schema, tag[:-1], {})
        now = _form(forms, tag[-1], at(layers.table, tag))
        before = [form for kind in earlier if (form := _form(forms, tag[-1], kind)) is not None]
        if now is None:  # reported by the validation
            continue
        for key in list(at(layers.table, tag[:-1])):
            below = (*tag[:-1], key)
            if key != tag[-1] and _is_below(layers, below, tag) and _goes(key, before, now):
                layers.drop(below)


def _goes(key: str, before: Sequence[Form], now: Form) -> bool:
    declared = any(key in fields_by_key(form) for form in before)
    stays = key in fields_by_key(now) or (takes_any(now) and not declared)
    return not stays and (declared or any(takes_any(form) for form in before))


def _is_below(layers: Layers, key: tuple[str, ...], tag: tuple[str, ...]) -> bool:
    limit = _rank(layers.origins[tag])
    return all(_rank(origin) < limit for leaf, origin in layers.origins.items() if leaf[: len(key)] == key)


def _rank(origin: str) -> int:
    return _RANKS.index(origin.partition(" ")[0])


def _form(forms: Sequence[Form], tag: str, kind: Any) -> Form | None:
    return next((form for form in forms if means(form, tag, kind)), None)
