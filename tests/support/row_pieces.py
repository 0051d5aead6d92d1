"""Pieces of a save of rows, each in memory of its own."""

from __future__ import annotations

import numpy as np

from parashard.plan.variables import Float32s
from parashard_server.state.rows.row_saving import RowSaving


def next_piece(saving: RowSaving, room_rows: int = 1 << 20) -> Float32s | None:
    """Return records of the next rows, shape (rows, stride), in memory for so many; None: there are no more."""
    room = np.full((min(room_rows, len(saving._rows)) + 1) * saving._memory.stride, np.nan, np.float32)
    beyond = len(room) - saving._memory.stride
    count = saving.next_piece(room[:beyond])
    assert np.isnan(room[beyond:]).all(), "written beyond the room"
    return room[:count].reshape(-1, saving._memory.stride) if count else None
