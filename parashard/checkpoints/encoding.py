"""Records: the small JSON files of the store, as bytes.

The encoding is canonical and covered by a SHA-256, so that a change of any bit is found before anything is parsed.
Knows no kind of record: those are in `manifest`.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from typing import Any, ClassVar, Final, Literal, TypeVar

from pydantic import SerializerFunctionWrapHandler, model_serializer

from parashard.errors import DamagedCheckpoint, NewerFormat, StoreFailed
from parashard.frozen_model import FrozenModel, first_problem

FORMAT: Final = 1
"""Format number of every record; a change that older readers cannot read raises it."""

MANIFEST_BYTES_MAX = 16 << 20
"""Largest record that is read or written: enough for about a million intervals of applied steps."""

_HEAD = b'{"body":'
_TAIL = re.compile(rb',"kind":"([a-z-]{1,40})","sha256":"[0-9a-f]{64}"\}\Z')


class Stored(FrozenModel):
    """A part of a record. Fields in `later`, which earlier versions lacked, are left out if empty."""

    later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value or name not in self.later}


class Record(Stored):
    """A file of the store; each kind has its own name."""

    kind: ClassVar[str]
    format: Literal[1] = FORMAT


R = TypeVar("R", bound=Record)


def encode(record: Record) -> bytes:
    """Return a record's bytes: canonical JSON with its kind and the SHA-256 of its body."""
    body = _canonical(record)
    if len(body) <= MANIFEST_BYTES_MAX:
        body = _canonical(type(record).model_validate_json(body))  # a written record can be read back
    content = _HEAD + body + _tail(record.kind, body)
    if len(content) > MANIFEST_BYTES_MAX:
        raise StoreFailed(f"a {record.kind} of {len(content)} bytes is not written; at most {MANIFEST_BYTES_MAX}")
    return content


def decode(cls: type[R], content: bytes, where: str) -> R:
    """Decode a record; `encode` of it gives exactly these bytes.

    Size and digest are checked before anything is parsed; at most a few copies of `content` are allocated until then.

    Raises `NewerFormat` for an intact record of a later version, `DamagedCheckpoint` for any other bytes.
    """
    kind = cls.kind
    if len(content) > MANIFEST_BYTES_MAX:
        raise DamagedCheckpoint(f"{where}: {len(content)} bytes; a {kind} has at most {MANIFEST_BYTES_MAX}")
    body = content[len(_HEAD) : max(len(_HEAD), len(content) - len(_tail(kind, b"")))]
    if content != _HEAD + body + _tail(kind, body):
        raise DamagedCheckpoint(f"{where}: these {len(content)} bytes are not a whole {kind} as it was written")
    try:
        record = cls.model_validate_json(body)
    except ValueError as error:
        newer = _format_of(body)
        if newer > FORMAT:
            raise NewerFormat(f"{where}: {newer_format(f'a {kind}', newer, FORMAT)}") from None
        raise DamagedCheckpoint(f"{where}: not a {kind} of format {FORMAT}: {first_problem(error)}") from None
    try:
        is_canonical = _canonical(record) == body
    except ValueError:  # the body has a number that is not finite
        is_canonical = False
    if not is_canonical:
        raise DamagedCheckpoint(f"{where}: a {kind} that is not in canonical form")
    return record


def newer_format(what: str, found: int, read: int) -> str:
    """Return the message that refuses a file of a later version."""
    return f"{what} of format {found}, and this version reads format {read}: a newer version of parashard wrote it"


def check_whole(content: bytes, where: str) -> None:
    """Verify that some bytes are an intact record of any kind."""
    tail = _TAIL.search(content)
    body = content[len(_HEAD) : tail.start()] if tail else b""
    if tail is None or content != _HEAD + body + _tail(tail[1].decode(), body):
        raise DamagedCheckpoint(f"{where}: these {len(content)} bytes are not a whole record as it was written")


def sha256_of(content: bytes | memoryview) -> str:
    """Return the SHA-256 of some bytes as 64 hex digits."""
    return hashlib.sha256(content).hexdigest()


def _format_of(body: bytes) -> int:
    """Return the format that a record's body declares; 0 if it declares none."""
    with suppress(ValueError, RecursionError):
        fields = json.loads(body)
        if isinstance(fields, dict) and type(fields.get("format")) is int:
            return int(fields["format"])
    return 0


def _canonical(record: Record) -> bytes:
    return json.dumps(record.plain(), sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _tail(kind: str, body: bytes) -> bytes:
    return f',"kind":"{kind}","sha256":"{sha256_of(body)}"}}'.encode("ascii")
