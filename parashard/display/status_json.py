"""A job's status as JSON: one object for `parashard status --json` and the coordinator's /status.json."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict

from parashard._proto import coordinator_pb2 as pb


def status_dict(status: pb.GetStatusReply) -> dict[str, Any]:
    """Return the whole status under the names of `protos/coordinator.proto`, ready for JSON.

    64-bit counts are texts and a figure that is not finite is "NaN" or "Infinity", as in protobuf's JSON. No key
    is missing but `training_loss` before the first step.
    """
    return MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
