"""Tests on hosts of their own are skipped loudly where there can be none; their jobs run beside one other cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from network_hosts import unavailable_reason


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    """Skip the test, with the reason, on a machine without hosts."""
    reason = unavailable_reason()
    if reason:
        pytest.skip(f"NO TEST OF HOSTS: {reason}")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put this folder's tests into the group of tests/chaos: five hosts are as much work as a campaign."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("more clusters"))
