"""Claims: incarnation numbers that never repeat, taken by conditional create before a process listens (P3).

Owns the names under ``claims/``. Does not know which store holds them, nor what an incarnation may do. Each life of a
shard and of the coordinator claims its number here; the newest claim is the one that may delete.
"""

from __future__ import annotations

import os
import socket

from parashard.errors import AlreadyStored, ConfigurationError
from parashard.store.base import Store

CLAIMS_MAX = 1_000_000


def claim_incarnation(store: Store, name: str) -> int:
    """Claim the next incarnation of a process and return it: 1 for its first life.

    Of processes that claim at once each gets another number. The claim is durable when this returns; its content (host
    name and process id) is for people.

    Raises
    ------
    ConfigurationError
        If the name is not allowed, has had `CLAIMS_MAX` lives, or the store lets a number be claimed twice.
    StoreFailed
        If the store gave an error; no number was claimed, or one that nobody will have.
    """
    content = f"{socket.gethostname()} {os.getpid()}\n".encode()
    for incarnation in range(newest_claim(store, name) + 1, CLAIMS_MAX):
        claim = f"claims/{name}/{incarnation:08}"
        try:
            store.create(claim, content)
        except AlreadyStored:
            continue
        _check_taken(store, claim, content)
        return incarnation
    raise ConfigurationError(f"{store.url}: {name} has had {CLAIMS_MAX} lives")


def newest_claim(store: Store, name: str) -> int:
    """Return the highest incarnation claimed for a name; 0 if there is none."""
    claimed = (claim for claim in store.names(f"claims/{name}") if claim.isdecimal())
    return max(map(int, claimed), default=0)


def _check_taken(store: Store, claim: str, content: bytes) -> None:
    """Refuse a store that does not keep the promise on which all fencing rests.

    Some servers that speak S3 ignore the condition of a conditional create.
    """
    try:
        store.create(claim, content)
    except AlreadyStored:
        return
    raise ConfigurationError(
        f"{store.url}: the store created {claim} twice: it does not support conditional create, "
        "without which two processes could hold one incarnation"
    )
