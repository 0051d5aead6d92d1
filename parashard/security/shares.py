"""Shares: how much of a bounded resource one peer may hold while there are others.

The rule is that of dynamic thresholds (Choudhury and Hahne, 1998, for buffers of switches): a peer that holds something
may take more only if it then holds at most `TIMES_FREE` times the amount still free. A peer that is alone may take all.
Pure, and not locked: each owner of a resource calls under its own lock. Does not know what a peer is
(`parashard.security.peers`) nor what is shared. Called by `parashard.security.grpc_admission`,
`parashard_server.serving.stream_server` and `parashard_server.serving.push_memory`.
"""

from __future__ import annotations

import math

TIMES_FREE = 3
"""One greedy peer gets three quarters; each further one leaves a quarter of what was free."""
ALONE_S = 10.0
"""A peer is alone when no other has held or requested anything for this long."""


class Shares:
    """Amounts that peers hold of a total.

    Invariants: `held` is the sum of all shares, and at most the total unless a single request exceeds the total. Right
    after a peer that held something, and was not alone, took more, it holds at most `TIMES_FREE * (total - held)`.

    Parameters
    ----------
    total : int
        The resource: calls, connections or bytes.
    alone_s : float
        Seconds after which other peers are forgotten. Infinite for what a peer may hold without bound, such as a
        connection: a peer that was alone would hold all of them when the next one connects.

    Attributes
    ----------
    held : int
        Sum over all peers.
    refused : int
        How often a peer was refused an amount that was free because its share was used up.
    """

    def __init__(self, total: int, alone_s: float = ALONE_S) -> None:
        self.total = total
        self.held = 0
        self.refused = 0
        self._alone_s = alone_s
        self._by_peer: dict[str, int] = {}
        self._latest = ("", -math.inf)  # the last peer to request something, and when
        self._before = -math.inf  # when any other peer last requested something

    def of(self, peer: str) -> int:
        """Return the amount that a peer holds."""
        return self._by_peer.get(peer, 0)

    def fits(self, amount: int) -> bool:
        """Return whether an amount is free; any amount is while nothing is held."""
        return not self.held or self.held + amount <= self.total

    def bound(self, amount: int) -> str:
        """Return the bound that a refused request exceeded, for an error's message."""
        return f"the share of one peer in {self.total}" if self.fits(amount) else str(self.total)

    def has_room(self, peer: str, amount: int, now_s: float) -> bool:
        """Return whether a peer may take an amount now.

        The first request of a peer is bounded by the free amount only, and so is the empty name, which stands for an
        unidentified peer, such as the one user of a Unix socket.
        """
        if not self.fits(amount):
            return False
        mine = self._by_peer.get(peer, 0)
        if not mine or not peer or self._alone(peer, now_s):
            return True
        return mine + amount <= TIMES_FREE * (self.total - self.held - amount)

    def take(self, peer: str, amount: int, now_s: float) -> bool:
        """Take an amount for a peer if it may; return whether it did."""
        self._note(peer, now_s)
        if not self.has_room(peer, amount, now_s):
            self.refused += self.fits(amount)
            return False
        self.held += amount
        self._by_peer[peer] = self._by_peer.get(peer, 0) + amount
        return True

    def give_back(self, peer: str, amount: int) -> None:
        """Return an amount that a peer took; forget peers that hold nothing."""
        left = self._by_peer.get(peer, 0) - amount
        assert left >= 0, f"{peer} gives back more than it took"
        self.held -= amount
        if left:
            self._by_peer[peer] = left
        else:
            self._by_peer.pop(peer, None)

    def transfer(self, giver: str, taker: str, amount: int) -> None:
        """Move an amount from one peer to another, regardless of their shares."""
        self.give_back(giver, amount)
        self.held += amount
        self._by_peer[taker] = self._by_peer.get(taker, 0) + amount

    def _note(self, peer: str, now_s: float) -> None:
        latest, at_s = self._latest
        if latest != peer:
            self._before = at_s
        self._latest = (peer, now_s)

    def _alone(self, peer: str, now_s: float) -> bool:
        """Return whether no other peer holds anything or has requested something lately."""
        if math.isinf(self._alone_s) or len(self._by_peer) > (peer in self._by_peer):
            return False
        latest, at_s = self._latest
        other_s = self._before if latest == peer else at_s
        return now_s - other_s >= self._alone_s
