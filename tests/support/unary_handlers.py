"""Methods of one message in and one out whose messages are bytes: what tests of channels and interceptors serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc


def raw_handlers(service: str, methods: dict[str, Callable[[bytes, grpc.ServicerContext], bytes]]) -> Any:
    """Return generic handlers of unary methods whose messages are bytes, not protobuf."""
    return grpc.method_handlers_generic_handler(
        service, {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    )
