"""A push and a pull pass through few functions of ours."""

from __future__ import annotations

import sys
import threading

import pytest

from benchmarks import frames

CEILINGS = {"shm": (69, 52), "tcp": (74, 48), "grpc": (82, 51)}


@pytest.mark.full("counts functions over three transports; what they do is tested elsewhere")
@pytest.mark.parametrize("transport", CEILINGS)
def test_a_push_and_a_pull_call_no_more_functions_than_told(transport: str) -> None:
    calls, before = frames.Calls(), (threading.getprofile(), sys.getprofile())
    threading.setprofile(calls.profile)
    sys.setprofile(calls.profile)
    try:
        rows, _ = frames.counted(transport, calls)
    finally:
        sys.setprofile(before[1])
        threading.setprofile(before[0])
    for row, most in zip(rows, CEILINGS[transport], strict=True):
        assert int(row[6]) <= most, row
