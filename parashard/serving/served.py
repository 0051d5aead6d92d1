"""ServedRun: a run whose checkpoints are followed by a thread, and read by the requests of many.

Owns the thread, the lock and the clock; decides nothing. Called by the service, the pages and
`parashard.serving.server`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.client.pulled_rows import TableSet
from parashard.errors import NotReady, ParashardError
from parashard.process.logs import log
from parashard.serving.behind import Behind, behind
from parashard.serving.following import Follower, Published, Sight
from parashard.store.base import Store

POLL_S = 0.2
"""Between two looks at a folder."""
SLOW_POLL_S = 2.0
"""Between two looks at an object store, or where the last one found something wrong."""
WAIT_S_MAX = 30.0
"""How long a request may wait for something newer."""


class ServedRun:
    """A run that is followed and served.

    Parameters
    ----------
    store : Store
        The run's.
    tables : TableSet
        The job's.
    job : str
        Its name.
    clock : callable
        Seconds since 1970.
    """

    def __init__(self, store: Store, tables: TableSet, job: str, clock: Callable[[], float] = time.time) -> None:
        self.tables = tables
        self.job = job
        self.run_id = ""
        self.looks = 0
        """How often the store was looked at."""
        self._clock = clock
        self._store = store
        elements = {name: table.row_elements for name, table in tables.by_name.items()}
        self._follower = Follower(store, elements)
        self._poll_s = POLL_S if store.local_path("run.json") is not None else SLOW_POLL_S
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following, and end the waits of requests."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def sight(self) -> Sight:
        """What the last look at the store found."""
        return self._follower.sight

    @property
    def now_s(self) -> float:
        """Seconds since 1970."""
        return self._clock()

    def published(self) -> Published:
        """Return what is served now.

        Raises
        ------
        NotReady
            If no checkpoint of every shard is there yet.
        """
        published = self._follower.published
        if published is None:
            raise NotReady(f"no checkpoint of job {self.job!r} can be served yet: {self.sight.problem}")
        return published

    def published_ids(self) -> list[CheckpointId]:
        """Return the names of the versions that are served; raises as `published`."""
        return [version.id for version in self.published().versions]

    def wait(self, newer: Callable[[Published], bool], wait_s: float) -> Published:
        """Return what is served once it is newer, or after `wait_s`; raises as `published`."""
        until_s = time.monotonic() + min(max(wait_s, 0.0), WAIT_S_MAX)
        with self._changed:
            while not self._stopping.is_set():
                published = self._follower.published
                left_s = until_s - time.monotonic()
                if left_s <= 0 or (published is not None and newer(published)):
                    break
                self._changed.wait(left_s)
        return self.published()

    def behind(self) -> Behind:
        """Return how far behind the run what is served is."""
        sight = self.sight
        return behind(self.published().versions, sight.newest, sight.final_steps, self.now_s)

    def look(self) -> None:
        """Look at the store once, and wake who waits for something newer; errors are told by `sight`, not raised."""
        try:
            changed = self._follower.look()
            if not self.run_id:
                run = Catalogue(self._store).run()
                self.run_id = run.run_id if run is not None else ""
        except Exception as error:  # what is served grows old, and has to say why, after a bug too
            ours = isinstance(error, ParashardError)
            if not ours:
                log.exception("look-broke")
            problem = str(error) if ours else f"{type(error).__name__}: {error}"
            self._follower.sight = Sight(self.sight.newest, self.sight.final_steps, problem)
            changed = False
        self.looks += 1
        if changed:
            log.info("published", versions=[str(id_) for id_ in self.published_ids()])
            with self._changed:
                self._changed.notify_all()

    def _follow(self) -> None:
        while not self._stopping.is_set():
            self.look()
            self._stopping.wait(
                max(self._poll_s, SLOW_POLL_S if self.sight.problem and self._follower.published else 0)
            )
