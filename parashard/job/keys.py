"""Dotted keys and single TOML values, as flags, environment variables and messages write them.

Pure text.
"""

from __future__ import annotations

import datetime
import functools
import json
import operator
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parashard.errors import ConfigurationError
from parashard.frozen_model import as_json

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
KEY = re.compile(rf"{_PART}(?:\.{_PART})*")
"""A dotted TOML key without spaces around its dots."""

NAMED = ("variables", "tables")
"""Tables whose keys are names that a job chooses; the environment cannot set them."""

_SHOWN_CHARACTERS = 80


def dotted(*parts: str | int) -> str:
    """Join the parts of a key as TOML writes it: `dotted("variables", "*.bias") == 'variables."*.bias"'`."""
    return ".".join(str(p) if _BARE.fullmatch(str(p)) else json.dumps(p, ensure_ascii=False) for p in parts)


def key_parts(key: str) -> tuple[str, ...]:
    """Split a dotted key into its parts; `key_parts(dotted(*p)) == p`."""
    try:
        if not KEY.fullmatch(key):
            raise ValueError(key)
        node = tomllib.loads(f"{key} = 0")
    except ValueError:
        raise ConfigurationError(
            f'{key!r} is not a key; a key is words joined by dots, such as cluster.shards or variables."*.bias".decay'
        ) from None
    ((parts, _),) = leaves(node)
    return parts


def toml_value(text: str) -> Any:
    """Read a text as one TOML value; anything else, dates and times included, stays text.

    >>> toml_value("4"), toml_value("[64, 32]"), toml_value("sync:4")
    (4, [64, 32], 'sync:4')
    """
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = table["value"]
    # More than one key: the text went on after a line break. No key of a job takes a date.
    is_other = len(table) > 1 or isinstance(value, (datetime.date, datetime.time))
    return text if is_other else value


def shown(value: Any) -> str:
    """Return a value for a message: close to TOML, on one line, truncated when long."""
    text = json.dumps(value, ensure_ascii=False, default=as_json)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def check_path(path: Path, where: str) -> None:
    """Refuse a path with bytes that are no text, which job files, arguments and reports cannot hold, or with a NUL."""
    if "\0" in str(path):
        raise ConfigurationError(f"{where}: the path {str(path)!r} has a NUL, which no file's name has")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"{where}: the path {os.fsencode(path)!r} is not text in UTF-8; rename the file or folder"
        ) from None


def leaves(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (key parts, value) of every value of nested tables that is not itself a table with keys."""
    for part, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*above, part))
        else:
            yield (*above, part), value


def at(table: Any, parts: Sequence[str]) -> Any:
    """Return the value of an existing key in nested tables."""
    return functools.reduce(operator.getitem, parts, table)


def plain(value: Any) -> Any:
    """Return a copy that has only the types of JSON: paths and dates become text, tuples become lists."""
    return json.loads(json.dumps(value, default=as_json))


def without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested tables without keys that are unset, which TOML cannot write."""
    return {
        key: without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }
