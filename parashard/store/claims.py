"""Claims: unique incarnation numbers, taken by conditional create before a process listens.

Owns the names under ``claims/``. Does not know which store holds them, nor what an incarnation may do. Each incarnation
of a shard and of the coordinator claims its number here. A process that finds a newer claim of another process ends;
the content of a claim identifies its process, also after a create whose reply was lost. A claim also records
that a shard's incarnation began by a rollback to an earlier round. Implements rules P3 and P23 of docs/protocol.md.
"""

from __future__ import annotations

import os
import re
import socket
from typing import NamedTuple

from parashard.errors import AlreadyStored, ConfigurationError, NotStored, Superseded
from parashard.store.base import Store

CLAIMS_MAX = 1_000_000
CLAIM_BYTES_MAX = 4096
_ROLLBACK = re.compile(rb"^returned to round ([0-9]{1,18})$", re.MULTILINE)


class Rollback(NamedTuple):
    """An incarnation that began by a rollback to `round`; later rounds of earlier incarnations are discarded."""

    incarnation: int
    round: int


class Claims:
    """The claims of one process, "coordinator" or "shard-N". One thread may claim at a time; `check` is safe from any.

    The token is drawn at random by the process. It identifies the process in the content of each claim, which also has
    the host name and the process id for information. `superseded` is set once another process's newer claim was found:
    this process can no longer save anything and must end.
    """

    def __init__(self, store: Store, name: str, token: str) -> None:
        assert token, "a claim needs a token to be distinguished from another's"
        self._store = store
        self._name = name
        self._content = f"{socket.gethostname()} {os.getpid()} {token}\n".encode()
        self._newest_own = 0  # every claim up to here is this process's, or older than its first
        self.superseded: Superseded | None = None

    def next(self, returning_to: int | None = None) -> int:
        """Claim the next incarnation and return it: 1 for the first one ever.

        Concurrent claims get different numbers. The claim is durable when this returns. A process that has claimed
        before cannot claim a number after another process's claim. `returning_to` is the round that the incarnation
        rolls back to, if later ones may have been saved.

        Raises
        ------
        Superseded
            If this process has claimed before and another one has since.
        ConfigurationError
            If the name is not allowed or has had `CLAIMS_MAX` incarnations, or the store let a number be claimed twice.
        StoreFailed
            On an error of the store; no number was claimed, or one that this process recognizes later.
        """
        if self._newest_own:
            self.check()
        content = self._content
        if returning_to is not None:
            content += f"returned to round {returning_to}\n".encode()
        for incarnation in range(newest_claim(self._store, self._name) + 1, CLAIMS_MAX):
            claim = _claim_name(self._name, incarnation)
            try:
                self._store.create(claim, content)
            except AlreadyStored:
                if not self._is_own(incarnation):
                    if self._newest_own:
                        self.check()
                    continue
            _check_taken(self._store, claim, content)
            self._newest_own = incarnation
            return incarnation
        raise ConfigurationError(f"{self._store.url}: {self._name} has had {CLAIMS_MAX} incarnations")

    def check(self) -> None:
        """Raise Superseded, and set it, unless the newest claim is this process's own."""
        # StoreFailed on an error of the store: the newest claim is unknown.
        newest = newest_claim(self._store, self._name)
        if newest <= self._newest_own:
            return
        if self._is_own(newest):
            self._newest_own = max(self._newest_own, newest)
            return
        self.superseded = Superseded(
            f"another process has claimed incarnation {newest} of {self._name}; this one, with incarnation "
            f"{self._newest_own}, can save nothing any more"
        )
        raise self.superseded

    def rollbacks(self, after: int) -> list[Rollback]:
        """Return the rollbacks by which incarnations after this one began, in order."""
        # Raises StoreFailed if the store gave an error.
        found = []
        for incarnation in filter(lambda claimed: claimed > after, _claimed(self._store, self._name)):
            found_rollback = _ROLLBACK.search(self._read(incarnation))
            if found_rollback is not None:
                found.append(Rollback(incarnation, int(found_rollback[1])))
        return found

    def _is_own(self, incarnation: int) -> bool:
        """Return whether a claim was made by this process."""
        return self._read(incarnation).startswith(self._content)

    def _read(self, incarnation: int) -> bytes:
        try:
            return self._store.read(_claim_name(self._name, incarnation), CLAIM_BYTES_MAX)
        except NotStored:
            return b""


def claim_incarnation(store: Store, name: str) -> int:
    """Claim the next incarnation for a process that claims once; see `Claims.next`."""
    return Claims(store, name, os.urandom(8).hex()).next()


def newest_claim(store: Store, name: str) -> int:
    """Return the highest incarnation claimed for a name; 0 if there is none."""
    return max(_claimed(store, name), default=0)


def _claimed(store: Store, name: str) -> list[int]:
    return sorted(int(claim) for claim in store.names(f"claims/{name}") if claim.isdecimal())


def _claim_name(name: str, incarnation: int) -> str:
    return f"claims/{name}/{incarnation:08}"


def _check_taken(store: Store, claim: str, content: bytes) -> None:
    """Refuse a store without conditional creates, on which fencing depends: some S3-compatible servers ignore them."""
    try:
        store.create(claim, content)
    except AlreadyStored:
        return
    raise ConfigurationError(
        f"{store.url}: the store created {claim} twice: it does not support conditional create, "
        "without which two processes could hold one incarnation"
    )
