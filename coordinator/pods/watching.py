"""PodWatch: follows the job's pods and keeps the Job at the wanted number of workers, on two threads of its own.

Owns when to ask again: after an error with a growing pause, after 410 Gone with a new list, after a conflict at once
and a bounded number of times. Knows no HTTP (`coordinator.pods.cluster`) and does not judge a pod's end
(`coordinator.pods.ledger`). Started by the coordinator's `__main__`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from coordinator.pods.cluster import Cluster, Conflict, StaleList
from coordinator.pods.ledger import PodEnd, PodLedger
from parashard.backoff import backoff_s
from parashard.errors import ConfigurationError, RetryLater

PAUSE_S = 0.5  # after the second error in a row; doubles
REST_S = 0.1  # before the next watch: a server may end each at once
LOOK_S = 0.5  # how often the wanted number of workers is looked at
CONFLICTS_MAX = 10

log = structlog.get_logger("pods")


class PodWatch:
    """Watches pods, and scales.

    Parameters
    ----------
    cluster : Cluster
        The API server.
    on_end : callable
        Is told of every end of a pod, on the watch's thread.
    wanted : callable
        Returns how many workers there should be.
    on_scaled : callable
        Is told in words what became of a change of that number.
    workers : int
        How many there are by the manifests: nothing is changed until another number is wanted.
    pause_s : float
        Pause after the second error in a row.
    """

    def __init__(
        self,
        cluster: Cluster,
        on_end: Callable[[PodEnd], None],
        wanted: Callable[[], int],
        on_scaled: Callable[[str], None],
        workers: int,
        *,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._cluster = cluster
        self._on_end = on_end
        self._wanted = wanted
        self._on_scaled = on_scaled
        self._workers = workers
        self._pause_s = pause_s
        self._ledger = PodLedger()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, name="pods", daemon=True),
            threading.Thread(target=self._keep_scaled, name="scale", daemon=True),
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask both threads to end; a watch under way is left behind, and ends with the process."""
        self._stopping.set()

    # --- following ---

    def _follow(self) -> None:
        version, errors = "", 0
        while not self._stopping.is_set():
            try:
                if not version:
                    pods, version = self._cluster.list_pods()
                    self._tell(self._ledger.listed(pods))
                for kind, pod, newer in self._cluster.watch_pods(version):
                    self._tell(self._ledger.deleted(pod) if kind == "DELETED" else self._ledger.changed(pod))
                    version, errors = newer, 0
                errors = 0
            except StaleList:
                log.info("listing-again", why="the list is too old to go on from")
                version, errors = "", errors + 1
            except (RetryLater, ConfigurationError) as error:
                # What is not allowed may be by and by: a Role is a change like any other.
                errors += 1
                log.warning("pods-not-watched", error=str(error), times=errors)
            self._stopping.wait(REST_S + backoff_s(self._pause_s, errors))

    def _tell(self, ends: list[PodEnd]) -> None:
        for end in ends:
            self._on_end(end)

    # --- scaling ---

    def _keep_scaled(self) -> None:
        errors = 0
        while not self._stopping.wait(LOOK_S + backoff_s(self._pause_s, errors)):
            wanted = self._wanted()
            if wanted == self._workers:
                continue
            try:
                self._scale(wanted)
            except RetryLater as error:
                errors += 1
                log.warning("not-scaled", workers=wanted, error=str(error), times=errors)
                continue
            except ConfigurationError as error:
                self._on_scaled(f"not scaled: {error}")
            else:
                self._on_scaled(f"the Job has {wanted} workers now")
            self._workers, errors = wanted, 0

    def _scale(self, workers: int) -> None:
        for _ in range(CONFLICTS_MAX):
            try:
                return self._cluster.scale_workers(workers)
            except Conflict:
                continue
        raise RetryLater(f"somebody else changed the Job {CONFLICTS_MAX} times meanwhile")
