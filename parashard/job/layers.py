"""Layers: one nested table merged from the job file, the environment and the flags, with the origin of each value.

Owns the order flag > environment > file, the form of the environment variables, and the list of those that are not
keys. Validation of the whole job finds unknown keys, and names their origin. A form is a model that a table can have,
by the annotations of `Job`; where there are several, a key of the table, `kind` or `source`, chooses.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from parashard.errors import ConfigurationError
from parashard.frozen_model import FrozenModel
from parashard.job.keys import KEY, NAMED, at, dotted, key_parts, leaves, plain, shown, toml_value

USERS_FORM = "module:factory"
"""The tag value of the form that accepts any value with a colon, and any other key; shown in messages."""

TAGS = ("kind", "source")
"""The keys that choose among the forms of a table."""

Form = type[FrozenModel]


def tag_values(form: Form, tag: str) -> tuple[str, ...]:
    """Return the values of a tag that mean this form."""
    annotation = form.model_fields[tag].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else (USERS_FORM,)


def takes_any(form: Form) -> bool:
    """Tell whether a form accepts keys besides those that are declared."""
    return form.model_config.get("extra") == "allow"


def fields_by_key(form: Form) -> dict[str, Any]:
    """Return the fields by their names in files."""
    return {field.alias or name: field for name, field in form.model_fields.items()}


def forms_in(annotation: Any) -> list[Form]:
    """Return the models in an annotation, in its order, without those inside a dict or tuple."""
    if isinstance(annotation, type) and issubclass(annotation, FrozenModel):
        return [annotation]
    if get_origin(annotation) in (dict, tuple):
        return []
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        arguments = arguments[:1]
    return [form for argument in arguments if argument is not NoneType for form in forms_in(argument)]


def forms_at(schema: Form, parts: tuple[str, ...], table: Any) -> list[Form]:
    """Return the forms of the table at `parts`: those of its kind if the whole table names that, else all."""
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
    """Return the forms of an annotation that match a plain table's kind, or all if none does."""
    forms = forms_in(annotation)
    return [form for form in forms if _is_kind(form, table)] or forms


def _is_kind(form: Form, table: Any) -> bool:
    tags = [tag for tag in TAGS if tag in form.model_fields]
    return isinstance(table, dict) and any(tag in table and means(form, tag, table[tag]) for tag in tags)


def means(form: Form, tag: str, value: Any) -> bool:
    """Tell whether a value of a tag chooses this form."""
    return (takes_any(form) and ":" in str(value)) or value in tag_values(form, tag)


DEFAULT = "default"
KEY_CHARACTERS_MAX = 500
PREFIX = "PARASHARD_"
SEPARATOR = "__"

Override = tuple[str, Any, str]
"""(dotted key, value, name of the flag), such as ("cluster.shards", 4, "--shards")."""


class Layers:
    """A nested table of JSON's types, and for each of its leaves the name of the layer that gave it."""

    def __init__(self, file: str, table: Mapping[str, Any], words: Mapping[str, str] = MappingProxyType({})) -> None:
        self.file = file
        self.table: dict[str, Any] = plain(table)
        self.origins: dict[tuple[str, ...], str] = {parts: self.file for parts, _ in leaves(table)}
        self.replaced: dict[tuple[str, ...], list[Any]] = {}
        """Earlier values of keys that a later `put` overrode, the oldest first."""
        self.words = words

    def put(self, parts: tuple[str, ...], value: Any, origin: str) -> None:
        """Set one key, replacing its earlier content; missing tables above it are created."""
        node = self.table
        for depth, part in enumerate(parts[:-1], start=1):
            below = node.setdefault(part, {})
            if not isinstance(below, dict):
                above = parts[:depth]
                raise ConfigurationError(
                    f"{origin}: {dotted(*parts)}: {dotted(*above)} is no table but {shown(below)} "
                    f"({self.origin(above)})"
                )
            self.origins.pop(parts[:depth], None)  # an empty table was a leaf until now
            node = below
        if parts in self.origins and node[parts[-1]] != plain(value):
            self.replaced.setdefault(parts, []).append(node[parts[-1]])
        node[parts[-1]] = plain(value)
        for known in [k for k in self.origins if k[: len(parts)] == parts]:
            del self.origins[known]
        for leaf, _ in leaves({parts[-1]: node[parts[-1]]}, parts[:-1]):
            self.origins[leaf] = origin

    def fill_in(self, environ: Mapping[str, str], tables: Sequence[str]) -> None:
        """Set from the environment those keys of some tables that no layer has set."""
        named = {name: value for name, value in environ.items() if names_a_key(name)}
        below = layered(Path(), {}, (), {n: v for n, v in named.items() if _environment_parts(n)[0] in tables})
        for parts, value in leaves(below.table):
            if self.origin(parts) == DEFAULT:
                self.put(parts, value, below.origin(parts))

    def drop(self, parts: tuple[str, ...]) -> None:
        """Remove one existing key and its content."""
        del at(self.table, parts[:-1])[parts[-1]]
        for known in [k for k in self.origins if k[: len(parts)] == parts]:
            del self.origins[known]

    def origin(self, parts: tuple[str, ...]) -> str:
        """Return where a key's value came from; for a table, the origins of its keys."""
        for length in range(len(parts), 0, -1):
            above = parts[:length]
            # The elements of a list came with the list; the keys of an empty table did not come with it.
            if above in self.origins and (above == parts or at(self.table, above) != {}):
                return self.origins[above]
        return " and ".join(self._origins_below(parts)) or DEFAULT

    def named(self, parts: tuple[str, ...]) -> str:
        """Return a key for a message: its origin and its dotted name, or a program's own words for it."""
        return self.words.get(dotted(*parts)) or f"{self.origin(parts)}: {dotted(*parts)}"

    def origin_of_missing(self, parts: tuple[str, ...]) -> str:
        """Return which layer should have given a missing key: the only layer of its table, else the file."""
        around = self._origins_below(parts[:-1]) if len(parts) > 1 else []
        return around[0] if len(around) == 1 else self.file

    def _origins_below(self, parts: tuple[str, ...]) -> list[str]:
        return list(dict.fromkeys(o for known, o in self.origins.items() if known[: len(parts)] == parts))


def layered(
    file: Path,
    table: Mapping[str, Any],
    overrides: Sequence[Override],
    environ: Mapping[str, str],
    words: Mapping[str, str] = MappingProxyType({}),
) -> Layers:
    """Return the file's table with the environment's values over it and the flags' values over both."""
    # `words`: for messages, a program's own words for keys, by their dotted names.
    layers = Layers(f"file {file}", table, words)
    named: dict[tuple[str, ...], str] = {}
    for parts, name in sorted((_environment_parts(n), n) for n in environ if names_a_key(n)):
        if parts in named:
            raise ConfigurationError(
                f"environment: {named[parts]} and {name} both set {dotted(*parts)}; unset one of them"
            )
        named[parts] = name
        layers.put(parts, toml_value(environ[name]), f"environment {name}")
    for key, value, flag in overrides:
        layers.put(key_parts(key), value, f"flag {flag}")
    return layers


def parse_set(text: str) -> Override:
    """Read one `--set key.path=value`: the value as TOML, else as text.

    >>> parse_set("model.hidden=[64, 32]")
    ('model.hidden', [64, 32], '--set')
    """
    key = KEY.match(text)
    if key is not None and len(key.group()) > KEY_CHARACTERS_MAX:
        raise ConfigurationError(f"flag --set: {shown(text)}: no key has {len(key.group()):,} characters")
    if key is None or not text.startswith("=", key.end()):
        raise ConfigurationError(f"flag --set: found {shown(text)}; allowed: key.path=value, such as cluster.shards=4")
    return key.group(), toml_value(text[key.end() + 1 :]), "--set"


def names_a_key(name: str) -> bool:
    """Tell whether an environment variable names a key of the job, right or wrong."""
    return name.upper().startswith(PREFIX) and SEPARATOR in name[len(PREFIX) :]


def _environment_parts(name: str) -> tuple[str, ...]:
    parts = tuple(name[len(PREFIX) :].lower().split(SEPARATOR))
    if not all(parts):
        raise ConfigurationError(
            f"environment {name}: not a key; allowed: {PREFIX}TABLE__KEY, such as PARASHARD_CLUSTER__SHARDS"
        )
    if parts[0] in NAMED:
        # Variables' names have capitals and dots, which the environment cannot express.
        raise ConfigurationError(
            f"environment {name}: settings of {parts[0]} come from the job file or from --set, not from the environment"
        )
    return parts


# --- variables that name no key ---

OWN_VARIABLES = (
    "PARASHARD_RUNS",
    "PARASHARD_RESUME",
    "PARASHARD_TLS_DIR",
    "PARASHARD_TRACE",
    "PARASHARD_FAILPOINTS",
    "PARASHARD_FAILPOINTS_DIR",
    "PARASHARD_FAILPOINTS_SEED",
)
"""Read by processes and commands."""

COMPOSE_VARIABLES = (
    "PARASHARD_BASE_IMAGE",
    "PARASHARD_COORDINATOR_MEMORY",
    "PARASHARD_CUDA_IMAGE",
    "PARASHARD_GIVE_UP_S",
    "PARASHARD_IMAGE",
    "PARASHARD_JOB",
    "PARASHARD_JOB_FOLDER",
    "PARASHARD_SCRIPT",
    "PARASHARD_SCRIPT_FOLDER",
    "PARASHARD_SHARD_MEMORY",
    "PARASHARD_STATUS_PORT",
    "PARASHARD_TRAIN_MEMORY",
    "PARASHARD_WORKERS",
    "PARASHARD_WORKER_MEMORY",
)
"""Read by compose files; exported in a shell, other commands see them too."""

_OTHERS = ("PARASHARD_CONTAINERS", "PARASHARD_CONTAINER_CACHE", "PARASHARD_LARGE")  # the project's own tests
_SERVICE_LINK = re.compile(r"_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT(_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)?")
"""Suffixes of the variables that Kubernetes sets in each pod of a namespace with a service named parashard-..."""

_DEPTH_MAX = 3  # of keys, as in optimizer.schedule.kind


def unread_variables(environ: Mapping[str, str], schema: Form) -> tuple[str, ...]:
    """Return a warning for each variable with our prefix that nothing reads."""
    unread = [given for given in sorted(environ) if _is_unread(given)]
    keys = {name.replace(SEPARATOR, "_"): name for name in (_variables_of(schema) if unread else ())}
    for given in unread:
        if given.upper() in keys:
            raise ConfigurationError(f"environment {given}: not a key; did you mean {keys[given.upper()]}?")
    return tuple(filter(None, (_warning(given, given.upper(), list(keys.values())) for given in unread)))


def _is_unread(given: str) -> bool:
    name = given.upper()
    return name.startswith(PREFIX) and not names_a_key(given) and name not in OWN_VARIABLES + _OTHERS


def _warning(given: str, name: str, keys: list[str]) -> str:
    last = [key for key in keys if key.rpartition(SEPARATOR)[2] == name.removeprefix(PREFIX)]
    meant = last if len(last) == 1 else []
    if name in COMPOSE_VARIABLES:
        why = "only compose files read it" if meant else ""
    else:
        why = "no such variable" if not re.search(rf"({_SERVICE_LINK.pattern})\Z", name) else ""
        meant = meant or difflib.get_close_matches(name, [*OWN_VARIABLES, *keys], n=1, cutoff=0.9)
    hint = f"; did you mean {meant[0]}?" if meant else ""
    return f"environment {given}: ignored, {why}{hint}" if why else ""


@functools.cache
def _variables_of(schema: Form) -> tuple[str, ...]:
    """Return the environment variable of every key of every kind; `[variables]` and `[tables]` have none."""
    return tuple(PREFIX + SEPARATOR.join(parts).upper() for parts in _keys(schema, ()) if parts[0] not in NAMED)


def _keys(schema: Form, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    nowhere: dict[str, Any] = {}
    for form in dict.fromkeys(forms_at(schema, above, nowhere)):
        for name in fields_by_key(form):
            parts = (*above, name)
            yield parts
            if len(parts) < _DEPTH_MAX:
                yield from _keys(schema, parts)
