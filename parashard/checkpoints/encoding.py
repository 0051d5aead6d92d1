"""Records: the small JSON files of the store, as bytes.

A record's bytes are one function of its fields, and a SHA-256 covers them all, so that a change of any bit is found
before anything is parsed. Knows no kind of record: those are in `manifest`. Called by whoever writes a record (shards
their manifests, the coordinator the other kinds) and by the catalogue, which reads them.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from parashard.errors import DamagedCheckpoint, StoreFailed

MANIFEST_BYTES_MAX = 16 << 20
"""Greatest record that is read or written: room for about a million intervals of applied steps."""

_HEAD = b'{"body":'
_TAIL = re.compile(rb',"kind":"([a-z-]{1,40})","sha256":"[0-9a-f]{64}"\}\Z')


class Table(BaseModel):
    """A part of a record: frozen, strict, no field that we do not know."""

    model_config = ConfigDict(defer_build=True, frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Record(Table):
    """A file of its own in the store; each kind has its own name."""

    kind: ClassVar[str]
    format: Literal[1] = 1


R = TypeVar("R", bound=Record)


def encode(record: Record) -> bytes:
    """Return a record's bytes: canonical JSON with its kind and the SHA-256 of its body.

    Raises
    ------
    StoreFailed
        If that is over MANIFEST_BYTES_MAX, so that nobody could read it back.
    """
    body = _canonical(record)
    content = _HEAD + body + _tail(record.kind, body)
    if len(content) > MANIFEST_BYTES_MAX:
        raise StoreFailed(f"a {record.kind} of {len(content)} bytes is not written; at most {MANIFEST_BYTES_MAX}")
    return content


def decode(cls: type[R], content: bytes, where: str) -> R:
    """Return the record in some bytes; `encode` of it gives exactly these bytes again.

    Nothing is parsed, and no more than a few copies of `content` allocated, before size and digest are checked.

    Parameters
    ----------
    cls : type of Record
        The kind that is expected.
    content : bytes
    where : str
        The file, for the error.

    Raises
    ------
    DamagedCheckpoint
        If the bytes are anything else.
    """
    kind = cls.kind
    if len(content) > MANIFEST_BYTES_MAX:
        raise DamagedCheckpoint(f"{where}: {len(content)} bytes; a {kind} has at most {MANIFEST_BYTES_MAX}")
    body = content[len(_HEAD) : max(len(_HEAD), len(content) - len(_tail(kind, b"")))]
    if content != _HEAD + body + _tail(kind, body):
        raise DamagedCheckpoint(f"{where}: these {len(content)} bytes are not a whole {kind} as it was written")
    try:
        record = cls.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise DamagedCheckpoint(f"{where}: not a {kind} of format 1: {field}: {first['msg']}") from None
    if _canonical(record) != body:
        raise DamagedCheckpoint(f"{where}: a {kind} that is not in canonical form")
    return record


def check_whole(content: bytes, where: str) -> None:
    """Check that some bytes are a record of whatever kind, as it was written.

    Raises
    ------
    DamagedCheckpoint
        If they are not.
    """
    tail = _TAIL.search(content)
    body = content[len(_HEAD) : tail.start()] if tail else b""
    if tail is None or content != _HEAD + body + _tail(tail[1].decode(), body):
        raise DamagedCheckpoint(f"{where}: these {len(content)} bytes are not a whole record as it was written")


def sha256_of(content: bytes | memoryview) -> str:
    """Return the SHA-256 of some bytes as 64 hex digits."""
    return hashlib.sha256(content).hexdigest()


def _canonical(record: Record) -> bytes:
    body = record.model_dump(mode="json")
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _tail(kind: str, body: bytes) -> bytes:
    return f',"kind":"{kind}","sha256":"{sha256_of(body)}"}}'.encode("ascii")
