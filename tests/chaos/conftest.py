"""Whole jobs under faults: each is half a dozen processes, so they run one at a time, beside other clusters."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put this folder's tests into a group that runs beside that of tests/integration: both stand a busy machine."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("more clusters"))
