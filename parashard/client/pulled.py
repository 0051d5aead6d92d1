"""Pulled: variables and rows of tables as pulled, with what they are of.

Knows no transport. Made by `parashard.client.shard_client`.
"""

from __future__ import annotations

from collections.abc import Sequence

from parashard.client.pull_buffers import PullBuffer, PullBuffers
from parashard.client.pulled_rows import PulledRows, RowPart


class Pulled:
    """Variables as pulled.

    Attributes
    ----------
    variables : dict of str to ndarray of float32
        By name, in their declared shapes; owned by the caller until `release`, and to be given back unchanged. In
        `async` and `ssp` parts of one shard may be of neighbouring versions.
    rows : dict of str to ndarray of float32, shape (keys, row_elements)
        By table: the rows whose keys were asked for, in their order; the caller's.
    keys : mapping of str to ndarray of uint64
        By table: these keys.
    versions : tuple of int
        By shard: the lowest version among what was pulled from it.
    incarnations : tuple of int
        By shard: the incarnation that answered; 0: several, one after the other.
    waited_s : float
        How long a shard waited for the version that was asked for.
    """

    def __init__(self, weights: PullBuffer, sets: PullBuffers, rows: PulledRows, waited_s: float = 0.0) -> None:
        self.variables = weights.variables
        self.rows, self.keys = rows.values, rows.keys
        self.versions = tuple(version or 0 for version in weights.versions)
        self.incarnations = weights.incarnations
        self._weights: PullBuffer | None = weights
        self._sets = sets
        self.waited_s = waited_s

    def include(self, parts: Sequence[RowPart], versions: Sequence[int], incarnations: Sequence[int]) -> None:
        """Count, too, what those parts of the rows were pulled from that came in requests of their own."""
        lowest, mixed = list(self.versions), list(self.incarnations)
        for part, version, incarnation in zip(parts, versions, incarnations, strict=True):
            lowest[part.shard] = min(lowest[part.shard], version)
            if incarnation != self.incarnations[part.shard]:
                mixed[part.shard] = 0
        self.versions, self.incarnations = tuple(lowest), tuple(mixed)

    def release(self) -> None:
        """Give the variables' arrays back, for a later pull to fill; they must not be used any more. Never needed."""
        if self._weights is not None:
            self._sets.give_back(self._weights)
            self._weights = None
