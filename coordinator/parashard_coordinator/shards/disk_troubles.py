"""Disk failures of the shards, as messages: one when a shard's writes begin to fail, one when they work again.

Has no clock and no disk. Called by `parashard_coordinator.run.coordination` with the shards' records once a second.
"""

from __future__ import annotations

from collections import defaultdict

from parashard._proto import shard_pb2
from parashard.process.debounce import Debounce


class DiskTroubles:
    """The present disk failures of shards."""

    def __init__(self) -> None:
        self._checkpoints: defaultdict[int, Debounce] = defaultdict(Debounce)

    def changed(self, shard: int, figures: shard_pb2.InspectReply, now_s: float) -> tuple[str, str, bool] | None:
        """Return the failure that began or ended since this shard's last record: a key, a text, and whether it is over.

        A restarted process does not end its predecessor's failure of checkpoints until it has stored one itself.
        """
        if figures.checkpoint_error:
            if self._checkpoints[shard].begins(now_s):
                return f"checkpoint-{shard}", f"shard-{shard}: checkpoint failed: {figures.checkpoint_error}", False
        elif figures.checkpoints and self._checkpoints[shard].ends(now_s):
            return f"checkpoint-{shard}", f"shard-{shard}: checkpoints are saved again", True
        return None
