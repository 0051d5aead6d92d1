"""ServedRun: a run that one thread follows, and that concurrent requests read."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from parashard.client.pulled_rows import TableSet
from parashard.errors import LimitExceeded, MalformedFrame, NotReady, ParashardError, shortened
from parashard.plan.embedding import Keys, mixed
from parashard.plan.partition import ELEMENT_BYTES
from parashard.process.logs import log
from parashard.serving.checkpoint_watcher import CheckpointWatcher, Published
from parashard.serving.live_shards import ShardWatcher
from parashard.serving.versions import Behind, LookedUp, behind, look_up

POLL_S = 0.2
"""Between two looks at a folder."""
SLOW_POLL_S = 2.0
"""Between two looks at an object store, or after a look that found a problem."""
KEYS_MAX = 1 << 16
"""Most keys of one request."""
ANSWER_BYTES_MAX = 4 << 20
WAIT_S_MAX = 30.0
"""Longest wait of a request for a newer version."""
ASK_S = 1.0
"""Between two checks that the caller of a waiting request is still there."""


class ServedRun:
    """A run that is followed and served."""

    def __init__(
        self,
        watcher: CheckpointWatcher | ShardWatcher,
        tables: TableSet,
        job: str,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tables = tables
        self.job = job
        self.looks = 0
        """Number of looks so far."""
        self._clock = clock
        self.watcher = watcher
        self._poll_s = poll_s
        self._said = False
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
    def now_s(self) -> float:
        """Seconds since 1970."""
        return self._clock()

    def published(self) -> Published:
        """Return the served versions; NotReady if there are none yet."""
        published = self.watcher.published
        if published is None:
            what = "nothing" if self.watcher.fresh else "no checkpoint"
            raise NotReady(f"{what} of job {self.job!r} can be served yet: {self.watcher.sight.problem}")
        return published

    def look_up(self, table: str, keys: Keys) -> tuple[Published, LookedUp]:
        """Return the served versions, and their rows for a user's keys."""
        published, known = self.published(), self.tables.by_name.get(table)
        most = KEYS_MAX if known is None else min(KEYS_MAX, ANSWER_BYTES_MAX // (ELEMENT_BYTES * known.row_elements))
        if len(keys) > most:
            raise LimitExceeded(
                f"{len(keys):,} keys of table {shortened(table)!r}; allowed: at most {most:,} in one request"
            )
        return published, look_up(self.tables, published.shards, table, mixed(keys))

    def wait(
        self, newer: Callable[[Published], bool], wait_s: float, asks: Callable[[], bool] = lambda: True
    ) -> Published:
        """Return the served versions once they are newer, or after `wait_s`, or when the caller is gone."""
        if math.isnan(wait_s):
            raise MalformedFrame("wait_s is NaN; allowed is a number of seconds")
        until_s = time.monotonic() + min(max(wait_s, 0.0), WAIT_S_MAX)
        with self._changed:
            while not self._stopping.is_set():
                published = self.watcher.published
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not asks() or (published is not None and newer(published)):
                    break
                self._changed.wait(min(left_s, ASK_S))
        return self.published()

    def behind(self) -> Behind:
        """Return how far the served versions are behind the run."""
        sight = self.watcher.sight
        return behind(self.published().versions, sight.newest, sight.final_steps, self.now_s, sight.looked_at)

    def look(self) -> None:
        """Look once, and wake requests that wait for a newer version; errors go to `sight`, and are not raised."""
        before = self.watcher.sight.problem
        try:
            changed = self.watcher.look()
        except Exception as error:  # a server that falls behind must say why, after a bug, too
            ours = isinstance(error, ParashardError)
            if not ours:
                log.exception("look-broke")
            problem = str(error) if ours else f"{type(error).__name__}: {error}"
            self.watcher.sight = replace(self.watcher.sight, problem=problem)
            changed = False
        if self.watcher.sight.problem and self.watcher.sight.problem != before:
            log.warning("not-published", problem=self.watcher.sight.problem)
        self.looks += 1
        if changed:
            if not self.watcher.fresh or not self._said:  # live versions come with each push
                log.info("published", versions=" ".join(str(version.id) for version in self.published().versions))
            self._said = True
            with self._changed:
                self._changed.notify_all()

    def _follow(self) -> None:
        while not self._stopping.is_set():
            began_s = time.monotonic()
            self.look()
            pause_s = self._poll_s
            if self.watcher.fresh:
                pause_s = max(pause_s, time.monotonic() - began_s)  # shards are asked half of the time at most
            elif self.watcher.sight.problem and self.watcher.published:
                pause_s = max(pause_s, SLOW_POLL_S)
            self._stopping.wait(pause_s)
