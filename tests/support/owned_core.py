"""A core that only the thread with its lock may touch; every access without it is recorded."""

from __future__ import annotations

import traceback
from typing import Any

from parashard_coordinator.core.core import Core
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.exclusive_core import ExclusiveCore
from support.coordinator_cases import core_of


class _Owned:
    """Notes in `trespasses` where its attributes were read or written without the lock."""

    def __getattribute__(self, name: str) -> Any:
        attributes = object.__getattribute__(self, "__dict__")
        lock = attributes.get("lock")
        if lock is not None and not lock._is_owned() and not name.startswith("__"):
            attributes["trespasses"].append(f"{name}: {''.join(traceback.format_stack(limit=6))}")
        return super().__getattribute__(name)


class OwnedCore(_Owned, Core):
    """A core that notes who touches it without the lock."""


class OwnedRecord(_Owned, JobRecord):
    """The state of its job, which notes the same."""


def owned_core(**options: Any) -> tuple[ExclusiveCore, list[str]]:
    """Return what has such a core, at a job's start, and the list of who touched it without the lock."""
    core = core_of(**options)
    core.__class__, core.job.__class__ = OwnedCore, OwnedRecord
    trespasses: list[str] = []
    exclusive = ExclusiveCore(core)
    for owned in (core, core.job):
        vars(owned).update(trespasses=trespasses, lock=exclusive._changed)
    return exclusive, trespasses
