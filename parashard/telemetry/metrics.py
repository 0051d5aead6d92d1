"""Metrics: the collectors behind /metrics, with prometheus_client imported by the first scrape.

Most processes of tests, and short jobs, are never scraped. Called by the services, which add what they count, and by
`parashard.telemetry.http`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from parashard.security.credentials import Credentials

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector


class Metrics:
    """Collectors of one process; thread-safe.

    Parameters
    ----------
    role : str
        Of the process, for parashard_build_info.
    credentials : Credentials, optional
        Of which the expiry is shown.
    refused : mapping, optional
        Of a process that serves others: reason -> returns how often it refused something to a peer for that reason.
        Reasons are few and do not name the peer.
    """

    def __init__(
        self,
        role: str,
        credentials: Credentials | None = None,
        refused: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:
        self._role = role
        self._credentials = credentials
        self._refused = refused
        self._lock = threading.Lock()
        self._pending: list[Callable[[], Collector]] = []
        self._registry: CollectorRegistry | None = None

    def add(self, collector: Callable[[], Collector]) -> None:
        """Show a further collector, which is made (and its module imported) at the next scrape."""
        with self._lock:
            self._pending.append(collector)

    def registry(self) -> CollectorRegistry:
        """Return the registry, with all that was added."""
        from parashard.telemetry.registry import new_registry

        with self._lock:
            if self._registry is None:
                self._registry = new_registry(self._role, self._credentials, self._refused)
            while self._pending:
                self._registry.register(self._pending[0]())
                del self._pending[0]
            return self._registry

    def scrape(self) -> tuple[str, bytes]:
        """Return the content type and the text of all metrics."""
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        return CONTENT_TYPE_LATEST, generate_latest(self.registry())
