"""Slots: an optimizer's state of whole variables, which a job goes on with.

Pure. Made of a checkpoint or of another framework's optimizer, and given to the next job's shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from parashard.plan.variables import Float32s

Slots = Mapping[str, Mapping[str, Float32s]]
"""By slot and variable: arrays of the variable's shape."""
NO_SLOTS: Slots = MappingProxyType({})


def flat_slots(slots: Slots) -> dict[str, Float32s]:
    """Return the arrays by the names SLOT/VARIABLE."""
    return {
        f"{slot}/{variable}": np.ascontiguousarray(values)
        for slot, of_slot in sorted(slots.items())
        for variable, values in sorted(of_slot.items())
    }


def slots_sha256(slots: Slots) -> str:
    """Return SHA-256 (hex) over names and float32 little-endian values."""
    digest = hashlib.sha256()
    for name, values in flat_slots(slots).items():
        digest.update(f"{name}\0".encode())
        digest.update(np.ascontiguousarray(values, "<f4").data)
    return digest.hexdigest()
