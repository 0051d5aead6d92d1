"""Clipping the gradient of a batch whose parts came one by one, by its norm on all shards.

Pure. A shard has the gradient's part of its own variables, and of each part of the batch the norm on all shards.
"""

from __future__ import annotations

import math


class PartNorms:
    """The norms of the parts of one batch.

    With p_k the gradient of part k, weighed by its share, S their sum, and a subscript for what this shard has of them:

        |S|^2 is taken as  |S_shard|^2 / sum_k |p_k,shard|^2 * sum_k |p_k|^2

    The fraction says how much of the squared norms the parts keep when they are added: noise cancels. With one shard
    this is the norm of S. With several, each assumes that its own variables keep as much as all do.
    """

    def __init__(self) -> None:
        self._here = 0.0
        self._everywhere = 0.0

    def add(self, squared: float, norm: float | None) -> None:
        """Take a part's squared norm on this shard, and its norm on all shards; None: not known, taken as that here."""
        self._here += squared
        self._everywhere += squared if norm is None else norm * norm

    def scale(self, squared: float, clip_norm: float) -> float:
        """Return what a batch's gradient is multiplied by, whose squared norm on this shard is `squared`."""
        kept = squared / self._here if self._here else 1.0  # where nothing on this shard tells: all of it
        total = kept * self._everywhere
        return min(1.0, clip_norm / math.sqrt(total)) if total > 0 else 1.0
