"""A span's context: every transport carries it as it is, and one that is not there takes no room."""

from __future__ import annotations

import numpy as np
import pytest

from parashard._proto import coordinator_pb2, tensor_pb2
from parashard.protocol import wire
from parashard.protocol.messages import Buffers
from parashard_server.serving import stream_services
from support.conformance_cases import DEADLINE_S, ELEMENTS, OFFSETS, pull_of, push_of
from support.in_process import use_small_messages
from support.traced_cases import CONTEXT, MALFORMED


def both(talk, context):
    """Push and pull with a context; return those that arrived with each."""
    arrived = []
    talk.plane.before = lambda request: arrived.append(request.traceparent)
    talk.transport.push(push_of(np.ones(600, np.float32))._replace(traceparent=context), DEADLINE_S).result()
    pushes = len(arrived)
    into = np.empty(ELEMENTS, np.float32)
    talk.transport.pull(pull_of(0, into.nbytes, traceparent=context), Buffers([into]), DEADLINE_S).result()
    return arrived[:pushes], arrived[pushes:]


@pytest.mark.parametrize("context", [CONTEXT, *MALFORMED[:-1]], ids=range(len(MALFORMED)))
def test_it_arrives_as_it_was(talk, context):
    assert both(talk, context) == ([context], [context])


@pytest.mark.parametrize("kind", ["grpc"], indirect=True)
def test_a_call_of_several_messages_has_it_once(start, monkeypatch):
    use_small_messages(monkeypatch, 1200)
    pushes, pulls = both(start(OFFSETS), CONTEXT)
    assert (pushes, pulls) == ([CONTEXT], [CONTEXT] + [""] * 9)


@pytest.mark.parametrize("kind", ["tcp"], indirect=True)
def test_the_first_turn_of_a_long_pull_has_it(start, monkeypatch):
    monkeypatch.setattr(stream_services, "PIECE_BYTES", 4096)
    assert both(start(OFFSETS), CONTEXT)[1] == [CONTEXT, "", ""]


def test_without_one_the_bytes_are_those_of_before():
    tag = bytes([11 << 3 | 2])  # field 11, of a length
    for header in (wire.push_header(push_of(np.ones(4))), wire.pull_header(pull_of(0, 16))):
        assert not [field for field, _ in header.ListFields() if field.name == "traceparent"]
        carrying = type(header).FromString(header.SerializeToString())
        carrying.traceparent = CONTEXT
        content = carrying.SerializeToString()
        assert content == header.SerializeToString() + tag + bytes([len(CONTEXT)]) + CONTEXT.encode()


def test_it_has_its_numbers_for_good():
    numbers = [
        message.DESCRIPTOR.fields_by_name["traceparent"].number
        for message in (tensor_pb2.PushHeader, tensor_pb2.PullHeader, coordinator_pb2.Grant)
    ]
    assert numbers == [11, 11, 3]
