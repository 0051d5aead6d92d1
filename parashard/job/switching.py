"""Switching: drop a table's keys that do not apply after a flag or the environment changes its kind.

A job file that reads a CSV has keys that the source `digits` lacks; `--set data.source=digits` drops them. Keys that
both kinds have stay, and keys given together with the new kind or after it are validated as usual. Knows the schema
only through its annotations. Called by `load`, before the job is validated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel

from parashard.job.keys import at
from parashard.job.layers import Layers
from parashard.job.problems import DISCRIMINATORS, models_at

_RANKS = ("file", "environment", "flag")


def drop_keys_of_earlier_kinds(layers: Layers, schema: type[BaseModel]) -> None:
    """Remove the keys that only an earlier kind of their table had and that came from below the present kind."""
    for tag, earlier in list(layers.replaced.items()):
        if tag[-1] not in DISCRIMINATORS or tag not in layers.origins:
            continue
        forms = models_at(schema, tag[:-1], {})
        now = _form(forms, tag[-1], at(layers.table, tag))
        before = [form for kind in earlier if (form := _form(forms, tag[-1], kind)) is not None]
        if now is None:  # reported by the validation
            continue
        for key in list(at(layers.table, tag[:-1])):
            below = (*tag[:-1], key)
            if key != tag[-1] and _is_below(layers, below, tag) and _goes(key, before, now):
                layers.drop(below)


def _goes(key: str, before: Sequence[type[BaseModel]], now: type[BaseModel]) -> bool:
    declared = any(key in _keys(form) for form in before)
    stays = key in _keys(now) or (_takes_any(now) and not declared)
    return not stays and (declared or any(_takes_any(form) for form in before))


def _is_below(layers: Layers, key: tuple[str, ...], tag: tuple[str, ...]) -> bool:
    limit = _rank(layers.origins[tag])
    return all(_rank(origin) < limit for leaf, origin in layers.origins.items() if leaf[: len(key)] == key)


def _rank(origin: str) -> int:
    return _RANKS.index(origin.partition(" ")[0])


def _form(forms: Sequence[type[BaseModel]], tag: str, kind: Any) -> type[BaseModel] | None:
    """Return the form of a table that a kind means; a user's own takes any "module:factory"."""
    named = [form for form in forms if kind in get_args(form.model_fields[tag].annotation)]
    users = [form for form in forms if _takes_any(form) and ":" in str(kind)]
    return next(iter([*named, *users]), None)


def _keys(form: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in form.model_fields.items()}


def _takes_any(form: type[BaseModel]) -> bool:
    return form.model_config.get("extra") == "allow"
