"""Messages of protobuf with one field at an edge: the table of what a process may be sent in each of its fields."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

NUMBERS = (math.nan, math.inf, -math.inf, -0.0, -1.0, -1e308, 1e308, 1e-320, 5e-324, 2.0**63)
UNSIGNED = (0, 1, 2**31, 2**32 - 1), (2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
SIGNED = (-(2**31), -1, 0, 2**31 - 1)
TEXTS = ("", "a\nb\x1b[2J", "x" * 70_000)
BYTES = (b"", b"\xff", bytes(70_000))

EDGES: dict[int, tuple[Any, ...]] = {
    Field.TYPE_DOUBLE: NUMBERS,
    Field.TYPE_FLOAT: NUMBERS,
    Field.TYPE_UINT32: UNSIGNED[0],
    Field.TYPE_UINT64: UNSIGNED[0] + UNSIGNED[1],
    Field.TYPE_FIXED64: UNSIGNED[0] + UNSIGNED[1],
    Field.TYPE_INT32: SIGNED,
    Field.TYPE_BOOL: (False, True),
    Field.TYPE_STRING: TEXTS,
    Field.TYPE_BYTES: BYTES,
    Field.TYPE_ENUM: (0, 99, -1),
}
"""By type of a field; a type that is not here fails the test that meets it."""


def at_edges(message: Message) -> Iterator[tuple[str, Message]]:
    """Yield copies of a message, each with one field at an edge, and what was changed.

    Fields of messages within it are among them; of a repeated field one more entry is.
    """
    for field in message.DESCRIPTOR.fields:
        for what, change in _changes(field, message):
            changed = type(message)()
            changed.CopyFrom(message)
            change(changed)
            yield f"{field.name}{what}", changed


def _changes(field: Field, message: Message) -> Iterator[tuple[str, Any]]:
    name, entry = field.name, field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        for value in EDGES[entry.fields_by_name["value"].type]:
            yield f"['x'] = {value!r}"[:60], lambda m, v=value: getattr(m, name).update({"x": v})
    elif field.is_repeated and entry is not None:
        some = getattr(message, name)
        base = type(some[0])() if len(some) else getattr(type(message)(), name).add()
        if len(some):
            base.CopyFrom(some[0])
        for what, one in at_edges(base):
            yield f"[+].{what}", lambda m, one=one: getattr(m, name).append(one)
    elif field.is_repeated:
        for value in EDGES[field.type]:
            yield f"[+] = {value!r}"[:60], lambda m, v=value: getattr(m, name).append(v)
    elif entry is not None:
        for what, one in at_edges(getattr(message, name)):
            yield f".{what}", lambda m, one=one: getattr(m, name).CopyFrom(one)
    else:
        for value in EDGES[field.type]:
            yield f" = {value!r}"[:60], lambda m, v=value: setattr(m, name, v)
