"""Shares: how much of a bounded resource one peer may hold while there are others.

The rule is that of dynamic thresholds (Choudhury and Hahne, 1998, for buffers of switches): who holds something may
take more only if it then holds at most `TIMES_FREE` times what is still free. Who is alone may take all. Pure, and not
locked: each owner of a resource asks under its own lock. Does not know who a peer is (`parashard.security.peers`) nor
what is shared. Called by `parashard.security.grpc_admission`, `parashard_server.serving.stream_server`,
`parashard_server.serving.receive_buffers` and `parashard_server.core.assembly`.
"""

from __future__ import annotations

import math

TIMES_FREE = 3
"""One peer that takes all it can gets three quarters; each further one leaves a quarter of what it found."""
ALONE_S = 10.0
"""Nobody else has held or asked for anything for so long: then a peer is alone."""


class Shares:
    """What each peer holds of a total.

    Invariants: `held` is the sum of all shares; it is at most the total, or one taking alone is larger. Right after a
    peer that held something, and was not alone, took more, it holds at most `TIMES_FREE * (total - held)`.

    Parameters
    ----------
    total : int
        What there is to share: calls, connections or bytes.
    alone_s : float
        Seconds after which others are forgotten; infinite: there may always be others. That is for what a peer may keep
        for ever, such as a connection: who was alone would have taken all when the next one comes.

    Attributes
    ----------
    held : int
        What all peers hold together.
    refused : int
        How often a peer did not get what was there, because its share was used up.
    """

    def __init__(self, total: int, alone_s: float = ALONE_S) -> None:
        self.total = total
        self.held = 0
        self.refused = 0
        self._alone_s = alone_s
        self._by_peer: dict[str, int] = {}
        self._latest = ("", -math.inf)  # who asked last, and when
        self._before = -math.inf  # when anybody but that one asked last

    def of(self, peer: str) -> int:
        """Return what a peer holds."""
        return self._by_peer.get(peer, 0)

    def fits(self, amount: int) -> bool:
        """Return whether so much is there at all; where nothing is held everything is."""
        return not self.held or self.held + amount <= self.total

    def bound(self, amount: int) -> str:
        """Return what stands against taking so much, for an error's message."""
        return f"the share of one peer in {self.total}" if self.fits(amount) else str(self.total)

    def has_room(self, peer: str, amount: int, now_s: float) -> bool:
        """Return whether a peer may take so much now.

        The first taking of a peer needs room only. The empty name stands for nobody in particular, such as the one user
        of a Unix socket, and has no share: it also needs room only.
        """
        if not self.fits(amount):
            return False
        mine = self._by_peer.get(peer, 0)
        if not mine or not peer or self._alone(peer, now_s):
            return True
        return mine + amount <= TIMES_FREE * (self.total - self.held - amount)

    def take(self, peer: str, amount: int, now_s: float) -> bool:
        """Take so much for a peer if it may; return whether it did."""
        self._note(peer, now_s)
        if not self.has_room(peer, amount, now_s):
            self.refused += self.fits(amount)
            return False
        self.held += amount
        self._by_peer[peer] = self._by_peer.get(peer, 0) + amount
        return True

    def give_back(self, peer: str, amount: int) -> None:
        """Return what a peer took; nothing is kept of peers that hold nothing."""
        left = self._by_peer.get(peer, 0) - amount
        assert left >= 0, f"{peer} gives back more than it took"
        self.held -= amount
        if left:
            self._by_peer[peer] = left
        else:
            self._by_peer.pop(peer, None)

    def pass_on(self, giver: str, taker: str, amount: int) -> None:
        """Give a taker what a giver holds, whatever their shares; the total stays as it is."""
        self.give_back(giver, amount)
        self.held += amount
        self._by_peer[taker] = self._by_peer.get(taker, 0) + amount

    def _note(self, peer: str, now_s: float) -> None:
        latest, at_s = self._latest
        if latest != peer:
            self._before = at_s
        self._latest = (peer, now_s)

    def _alone(self, peer: str, now_s: float) -> bool:
        """Return whether nobody else holds anything, or has asked lately."""
        if math.isinf(self._alone_s) or len(self._by_peer) > (peer in self._by_peer):
            return False
        latest, at_s = self._latest
        other_s = self._before if latest == peer else at_s
        return now_s - other_s >= self._alone_s
