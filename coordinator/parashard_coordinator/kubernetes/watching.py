"""PodWatch: follows the job's pods and keeps the Job at the wanted number of workers, on two threads of its own.

Owns the retries: with back-off after an error, with a new list after 410 Gone or an unreadable answer, at once and a
bounded number of times after a conflict, with a long back-off or on a new request after a refused scaling. Knows no
HTTP (`parashard_coordinator.kubernetes.cluster`) and does not classify a pod's end
(`parashard_coordinator.core.pod_ledger`). Started by the coordinator's `__main__`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from parashard.errors import ConfigurationError, RetryLater
from parashard.process.backoff import backoff_s
from parashard.process.logs import log
from parashard_coordinator.core.pod_ledger import PodEnd, PodLedger
from parashard_coordinator.kubernetes.cluster import Cluster, Conflict, StaleList, Unreadable

PAUSE_S = 0.5  # after the second error in a row; doubles
REST_S = 0.1  # before the next watch: a server may end each at once
LOOK_S = 0.5  # interval of checks of the wanted number of workers
CONFLICTS_MAX = 10
REFUSED_LOOKS = 10  # checks until a refused scaling is retried; doubles
REFUSED_LOOKS_MAX = 640  # 5 minutes and 20 seconds


class Wanted(NamedTuple):
    """The wanted number of workers, and the number of its request: a repeated request has a new one."""

    workers: int
    request: int


class PodWatch:
    """Watches pods, and scales.

    `on_end` is called with every end of a pod, `on_scaled` with the outcome of each scaling. Nothing is changed while
    the manifests' number of workers is wanted and no request to scale was made.
    """

    def __init__(
        self,
        cluster: Cluster,
        on_end: Callable[[PodEnd], None],
        wanted: Callable[[], Wanted],
        on_scaled: Callable[[str], None],
        on_error: Callable[[], None],
        workers: int,
        *,
        pause_s: float = PAUSE_S,
        look_s: float = LOOK_S,
    ) -> None:
        self._cluster = cluster
        self._on_end = on_end
        self._wanted = wanted
        self._on_scaled = on_scaled
        self._on_error = on_error
        self._settled = Wanted(workers, 0)
        self._pause_s = pause_s
        self._look_s = look_s
        self._ledger = PodLedger()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, name="pods", daemon=True),
            threading.Thread(target=self._keep_scaled, name="scale", daemon=True),
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask both threads to end; a watch in progress is abandoned, and ends with the process."""
        self._stopping.set()

    # --- following ---

    def _follow(self) -> None:
        version, errors, unreadable = "", 0, 0
        while not self._stopping.is_set():
            try:
                if not version:
                    pods, version = self._cluster.list_pods()
                    self._tell(self._ledger.listed(pods))
                for kind, pod, newer in self._cluster.watch_pods(version):
                    self._tell(self._ledger.deleted(pod) if kind == "DELETED" else self._ledger.changed(pod))
                    version, errors = newer, 0
                errors, unreadable = 0, 0
            except StaleList:
                log.info("listing-again", why="the list is too old to go on from")
                version, errors = "", errors + 1
            except Unreadable as error:
                # Only a watch that ended regularly resets the back-off, not events before an error.
                version, unreadable = "", unreadable + 1
                self._on_error()
                if unreadable.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th, ...: it may last for days
                    log.warning("pods-not-watched", error=str(error), times=unreadable, then="they are listed again")
            except (RetryLater, ConfigurationError) as error:
                # A missing permission may be granted later.
                errors += 1
                self._on_error()
                log.warning("pods-not-watched", error=str(error), times=errors)
            # An unreadable answer is followed by a pause at once.
            pause_s = max(backoff_s(self._pause_s, errors), backoff_s(self._pause_s, unreadable and unreadable + 1))
            self._stopping.wait(REST_S + pause_s)

    def _tell(self, ends: list[PodEnd]) -> None:
        for end in ends:
            self._on_end(end)

    # --- scaling ---

    def _keep_scaled(self) -> None:
        errors = 0
        refused: Wanted | None = None
        looks = looks_left = 0  # checks between retries of a refused scaling; until the next one
        while not self._stopping.wait(self._look_s + backoff_s(self._pause_s, errors)):
            wanted = self._wanted()
            if wanted == self._settled:
                continue
            if wanted == refused and looks_left:
                looks_left -= 1
                continue
            try:
                self._scale(wanted.workers)
            except (RetryLater, Unreadable) as error:
                errors += 1
                log.warning("not-scaled", workers=wanted.workers, error=str(error), times=errors)
            except ConfigurationError as error:
                # The Role may be changed, or the user may repeat the request.
                if wanted != refused:
                    refused, looks = wanted, REFUSED_LOOKS // 2
                    self._on_scaled(f"not scaled: {error}")
                looks = looks_left = min(2 * looks, REFUSED_LOOKS_MAX)
                errors = 0
                log.warning("not-scaled", workers=wanted.workers, error=str(error))
            else:
                self._on_scaled(f"the Job has {wanted.workers} workers now")
                self._settled, refused, errors = wanted, None, 0

    def _scale(self, workers: int) -> None:
        for _ in range(CONFLICTS_MAX):
            try:
                return self._cluster.scale_workers(workers)
            except Conflict:
                continue
        raise RetryLater(f"the Job was changed concurrently {CONFLICTS_MAX} times")
