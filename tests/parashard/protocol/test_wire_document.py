"""The frames in docs/wire-format.md are those that `protocol.wire` writes and reads, and hold what the page says."""

import re
from pathlib import Path

import numpy as np
import pytest

from parashard.plan.partition import Partition
from parashard.protocol import wire
from parashard.protocol.messages import (
    Ack,
    Buffers,
    DType,
    PullRun,
    Push,
    PushResult,
    Slice,
    Target,
    VectorRun,
    Weights,
)

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "wire-format.md").read_text()
HEX_ROW = re.compile(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} ){1,16}) (.+)")

TARGET = Target("c0ffee00c0ffee00", "ab" * 32, plan_version=1, shard=0, incarnation=1)
BIAS = Slice(Partition("bias", 0, 4), 1, DType.FLOAT32)
VALUES = np.array([1.0, -1.0, 0.5, 0.0], "<f4").tobytes()


def frames() -> list[bytes]:
    """Return the page's hex blocks, whose rows say where they begin and how they look as text."""
    found = []
    for block in re.findall(r"^```\n(0000  .*?)^```$", PAGE, re.M | re.S):
        frame = b""
        for row in block.splitlines():
            match = HEX_ROW.fullmatch(row)
            assert match is not None, row
            content = bytes.fromhex(match[2])
            assert int(match[1], 16) == len(frame), row
            assert match[3] == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in content), row
            frame += content
        found.append(frame)
    return found


def explained() -> list[tuple[int, bytes]]:
    """Return (offset, bytes that begin there) of each row that explains the push."""
    rows = re.findall(r"^\| ([0-9a-f]{4}) \| `([^`]+)` \|", PAGE, re.M)
    return [(int(offset, 16), bytes.fromhex(content.split("...")[0])) for offset, content in rows]


def test_the_page_has_a_push_its_ack_and_weights():
    assert len(frames()) == 3


def test_the_push_is_read_and_written_as_the_page_says():
    push = Push(TARGET, "worker-0", 7, (BIAS,), False, pulled_version=5, payload=Buffers([VALUES]))
    header, payload = wire.decode_push(frames()[0])
    assert header.total_bytes == 16
    assert wire.push_from(header, payload)._replace(payload=push.payload) == push
    assert payload == VALUES
    first, rest = wire.encode_push(push)
    assert [first, *rest] == frames()[:1]


@pytest.mark.parametrize(("offset", "content"), explained(), ids=lambda value: value if isinstance(value, int) else "")
def test_each_explained_part_of_the_push_lies_where_the_page_says(offset, content):
    assert frames()[0][offset : offset + len(content)] == content


def test_the_push_is_explained_from_its_first_part_to_its_payload():
    offsets = [offset for offset, _ in explained()]
    assert offsets == sorted(offsets)
    assert (len(offsets), offsets[0], offsets[-1]) == (16, 0, 0x90)


def test_the_ack_is_read_and_written_as_the_page_says():
    ack = Ack(PushResult.APPLIED, version=8, staleness=2)
    assert wire.decode_ack(frames()[1]) == ack
    assert wire.encode_ack(ack) == frames()[1]


def test_the_weights_are_read_and_written_as_the_page_says():
    asked = PullRun(TARGET, None, None, offset_bytes=0, length_bytes=16, known_version=None)
    assert wire.decode_weights(frames()[2], asked) == Weights(8, (VectorRun(0, memoryview(VALUES)),))
    assert wire.encode_weights(Weights(8, (VectorRun(0, memoryview(VALUES)),))) == frames()[2]
