"""Pieces of a save of rows, each in memory of its own."""

from __future__ import annotations

from parashard.plan.variables import Float32s
from parashard_server.state.rows.row_saving import RowSaving


def next_piece(saving: RowSaving) -> Float32s | None:
    """Return records of the next rows, shape (rows, stride); None: there are no more."""
    room = saving.room(1 << 30)
    count = saving.next_piece(room)
    return room[:count].reshape(-1, saving._memory.stride) if count else None
