"""Tables of a shard that break a rule, each the smallest change of the real part that forgets it.

Used by `broken_rules` alone; the product has no switches.
"""

from __future__ import annotations

from collections.abc import Sequence

from parashard.checkpoints.manifest import TableFile
from parashard_server.state.rows.embedding_tables import EmbeddingTables, Pushed, TablesCut


class ForgottenMoves(EmbeddingTables):
    """P33 off: what a checkpoint that was not stored had is not in the next one."""

    def end_save(self, cut: TablesCut, files: Sequence[TableFile] | None) -> None:
        super().end_save(cut, self._files if files is None else files)


class OwnTime(EmbeddingTables):
    """P29 off: a shard counts the time of its rows by itself, from its own start."""

    _time = 0

    def apply(
        self,
        pushed: Pushed,
        *,
        t: int,
        scale: float = 1.0,
        learning_rate: float | None = None,
    ) -> None:
        self._time += 1
        super().apply(pushed, t=self._time, scale=scale, learning_rate=learning_rate)
