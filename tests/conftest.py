"""Fixtures that several folders of tests share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def xp_gpu() -> Any:
    """Return `cupy` where it is installed and sees a device; skip the test, with the reason, where not."""
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"cupy finds no CUDA device: {error}")
    if devices == 0:
        pytest.skip("cupy finds no CUDA device")
    return cupy
