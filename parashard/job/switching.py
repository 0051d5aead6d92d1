"""Switching: drop a table's keys that do not apply after a flag or the environment changes its kind, or no longer.

A job file that reads a CSV has keys that the source `digits` lacks; `--set data.source=digits` drops them. Keys that
both kinds have stay, and keys given together with the new kind or after it are validated as usual. Job files of earlier
runs name each key, also those that were removed since. Knows the schema only through its annotations. Called by `load`,
before the job is validated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parashard.errors import ConfigurationError
from parashard.job.forms import TAGS, Form, fields_by_key, forms_at, means, takes_any
from parashard.job.keys import at, shown
from parashard.job.layers import Layers
from parashard.plan.optimizers import REMOVED_SETTINGS, WHY_REMOVED

_RANKS = ("file", "environment", "flag")

_DURABILITY, _LOG_FSYNC = ("checkpoint", "durability"), ("checkpoint", "log_fsync")
_NO_LOG = "the log of pushes was removed; leave the key out, and set a shorter checkpoint.every_s to compute less again"


def drop_removed_keys(layers: Layers, *, begun: bool = False) -> None:
    """Remove settings that no longer exist: of optimizers where their value turned them off, and the log of pushes.

    `begun`: the job is that of a run that has begun, perhaps with the log.

    Raises
    ------
    ConfigurationError
        If one has another value.
    """
    if _DURABILITY in layers.origins:
        found = at(layers.table, _DURABILITY)
        if found != "checkpoint" and not (begun and found == "log"):
            raise ConfigurationError(f"{layers.named(_DURABILITY)}: found {shown(found)}; {_NO_LOG}")
    for removed in (_DURABILITY, _LOG_FSYNC):
        if removed in layers.origins:
            layers.drop(removed)
    for parts in list(layers.origins):
        if "optimizer" in parts[:-1] and parts[-1] in REMOVED_SETTINGS:
            found = at(layers.table, parts)
            if found != REMOVED_SETTINGS[parts[-1]]:
                raise ConfigurationError(f"{layers.named(parts)}: found {shown(found)}; {WHY_REMOVED}")
            layers.drop(parts)


def drop_keys_of_earlier_kinds(layers: Layers, schema: Form) -> None:
    """Remove the keys that only an earlier kind of their table had and that came from below the present kind."""
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
