"""Templates: texts with `@{name}` in them, in the folder beside this file.

Owns the substitution of values: part of a line verbatim, whole lines indented like their placeholder. Text rather than
objects, so that the rendered files keep their comments. Knows neither jobs nor Kubernetes; called by
`parashard.render.kubernetes`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

_ROOT = files("parashard.render") / "templates"
_PLACE = re.compile(r"@\{(\w+)\}")


def template(path: str) -> str:
    """Return the text of a template, such as ``base/shards.yaml``."""
    return _ROOT.joinpath(*path.split("/")).read_text()


def templates(folder: str) -> list[str]:
    """Return the paths of all templates in a folder and below it, sorted."""
    return sorted(f"{folder}/{path}" for path in _below(_ROOT / folder))


def filled(text: str, values: Mapping[str, str]) -> str:
    """Substitute values for placeholders.

    A placeholder alone on its line takes whole lines, each indented like it; an empty value removes the line. Values
    may have placeholders.

    Parameters
    ----------
    text : str
        With placeholders `@{name}`.
    values : mapping of str to str
        By name.

    Raises
    ------
    KeyError
        If a value is missing: an error of the template, not of the job.
    """
    lines: list[str] = []
    for line in text.splitlines():
        place = _PLACE.fullmatch(line.strip())
        if place is None:
            lines.append(_PLACE.sub(lambda found: values[found[1]], line))
            continue
        indent = line[: len(line) - len(line.lstrip())]
        inner = filled(values[place[1]], values).splitlines()
        lines += [f"{indent}{part}" if part else "" for part in inner]
    return "".join(f"{line}\n" for line in lines)


def _below(folder: Traversable) -> list[str]:
    found: list[str] = []
    for entry in folder.iterdir():
        found += [f"{entry.name}/{path}" for path in _below(entry)] if entry.is_dir() else [entry.name]
    return found
