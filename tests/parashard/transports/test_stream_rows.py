"""The answer to a pull of rows in a slot, by a shard that lies of its length."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from parashard._proto import tensor_pb2
from parashard.errors import MalformedFrame
from parashard.transports.stream import Kind, Stream
from parashard.transports.stream_transport import rows_answered
from support.conformance_cases import keys_of, rows_of


@pytest.mark.parametrize(
    ("lengths", "payload", "says"),
    [
        ([101], b"", r"rows of \[101\] bytes in a slot of 100, 0 beside it"),
        ([8, 8], b"", r"rows of \[8, 8\] bytes in a slot of 100"),
        ([13], b"12345678", r"rows of \[13\] bytes in a slot of 100, 8 beside it"),
        ([12], b"", "end at byte 13 of 12"),
        ([14], b"", "rows of 13 bytes in a payload of 14"),
    ],
)
def test_a_length_that_cannot_be_is_refused(lengths: list[int], payload: bytes, says: str) -> None:
    ours, theirs = (Stream(end, "shard") for end in socket.socketpair())
    slot = np.zeros(100, np.uint8)
    slot[0] = 1  # the only key has a row: 3 float32s
    reply = tensor_pb2.PullReply(version=1, run_offsets=[0] * len(lengths), run_lengths=lengths)
    reply.tables.add(table="user", present=1, row_elements=3, dtype=tensor_pb2.DTYPE_FLOAT32)
    soon = time.monotonic() + 10
    theirs.send(Kind.WEIGHTS, reply, [memoryview(payload)], deadline_s=soon)
    with pytest.raises(MalformedFrame, match=says):
        rows_answered(ours, rows_of({"user": keys_of(1)}), deadline_s=soon, slot=slot)
    for end in (ours, theirs):
        end.close()
