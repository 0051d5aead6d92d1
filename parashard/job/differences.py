"""Differences between two jobs, as text: both values of each changed key, without keys derived from others.

Knows identities (`parashard.job.digest`) and no process. Called by the coordinator, which refuses to resume a changed
job, and by workers, which refuse to join a different one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parashard.job.digest import changed_keys
from parashard.job.keys import dotted, key_parts, leaves, shown

NAMED_MAX = 8  # in one error

_CONTENT = {
    "code.sha256": "the code of the model",
    "data.fingerprint": "the content of the data",
    "initial.sha256": "the initial values",
}
"""Keys whose values are digests, and of what."""

_PROPERTIES = {
    "data.classes": "number of classes",
    "data.examples": "number of training examples",
    "data.fields": "arrays of an example",
    "data.held_out": "number of held-out examples",
    "data.input_shape": "shape of an input",
}
"""Keys of the identity that no job file has: properties of the data."""


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any], there: str, here: str) -> list[str]:
    """Return one phrase for each difference between two identities, the keys of a job file first.

    Parameters
    ----------
    theirs, mine : mapping
        As `job_identity` returns them.
    there, here : str
        Which job has which value, such as "in the run" and "now".
    """
    changed = changed_keys(theirs, mine)
    if any(key.startswith(("model.", "data.")) for key in changed):  # the variables follow from these
        changed = [key for key in changed if not key.startswith("variables.")]
    if any(key in _PROPERTIES for key in changed):
        changed = [key for key in changed if key != "data.fingerprint"]
    values = [{dotted(*parts): value for parts, value in leaves(identity)} for identity in (theirs, mine)]
    return [_phrase(key, values[0].get(key), values[1].get(key), there, here) for key in sorted(changed, key=_order)]


def in_words(phrases: list[str]) -> str:
    """Return the first NAMED_MAX phrases as one text, and how many more there are; "" for none."""
    more = len(phrases) - NAMED_MAX
    return "; ".join(phrases[:NAMED_MAX]) + (f"; and {more} more" if more > 0 else "")


def _order(key: str) -> tuple[bool, str]:
    return key in _CONTENT or key in _PROPERTIES or key_parts(key)[0] == "variables", key


def _phrase(key: str, theirs: Any, mine: Any, there: str, here: str) -> str:
    if key in _CONTENT:
        return f"{_CONTENT[key]} differs"
    name = _PROPERTIES.get(key, key)
    return f"{name} is {_value(theirs)} {there}, {_value(mine)} {here}"


def _value(value: Any) -> str:
    return "unset" if value is None else shown(value)
