"""Fan a request out to all shards, and retry those that are busy, unreachable or in another incarnation.

The only place where a pull or a push is retried. Owns the order of beginning, waiting and retrying, and the time for
it. Knows neither pushes nor pulls. Thread-safe.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import tenacity

from parashard.errors import ParashardError, QueueFull, RetryLater, StaleIncarnation, Unreachable, WrongRun
from parashard.transports.base import Pending

RETRY_PAUSE_S = 0.02
RETRY_PAUSE_MAX_S = 0.5
RETRY_PAUSE_SHARE = 0.25
"""A pause is at most this share of the time that the shard has been away: retries prolong an outage by no more."""

_Answer = TypeVar("_Answer")


class FanOut:
    """Requests to all shards, each retried for `retry_budget_s` unless `cancelled` is set.

    `refresh` updates the shards' addresses before the retry of a shard that is unreachable or answers for another
    incarnation or run: another run may have taken the port. Without it the latter are not retried. `now_s` is the
    budget's clock; monotonic seconds by default.
    """

    def __init__(
        self,
        retry_budget_s: float,
        cancelled: threading.Event,
        refresh: Callable[[], None] | None = None,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self._retry_budget_s = retry_budget_s
        self._now_s = now_s or time.monotonic
        self._cancelled = cancelled
        self._refresh = refresh
        self._retried: tuple[type[ParashardError], ...] = (
            (RetryLater,) if refresh is None else (RetryLater, StaleIncarnation, WrongRun)
        )

    def request_all(
        self,
        begin: Callable[[int], Pending[_Answer]],
        shards: int,
        settled: Callable[[int, _Answer], None] | None = None,
        unacknowledged: Callable[[int], None] | None = None,
    ) -> tuple[_Answer, ...]:
        """Begin a request on every shard, wait for each, then retry; return the answers by shard.

        Retries come last to avoid a deadlock: a client that waits for one shard while it holds another's connection or
        buffer could wait for a client that does the reverse. `begin` starts the request to a shard at its current
        address; `settled` is called with every answer, `unacknowledged` for a request that may have reached its shard
        and was not answered. Raises the first error that is not retried, or the last once the budget is spent; no
        request is in flight then.
        """
        pending: dict[int, Pending[_Answer]] = {}
        answers: dict[int, _Answer] = {}
        failures: dict[int, ParashardError] = {}

        def receive(shard: int) -> None:
            """Wait for an answer; after an error the request does not write to arrays any more."""
            try:
                answers[shard] = pending[shard].result()
            except ParashardError as error:
                pending[shard].cancel()
                if unacknowledged is not None and isinstance(error, Unreachable):
                    unacknowledged(shard)
                raise
            if settled is not None:
                settled(shard, answers[shard])

        def retry(shard: int) -> None:
            pending[shard] = begin(shard)
            receive(shard)

        try:
            for shard in range(shards):
                try:
                    pending[shard] = begin(shard)
                    if shard < shards - 1:
                        pending[shard].start()
                except self._retried as error:
                    failures[shard] = error.with_traceback(None)
            for shard in reversed(tuple(pending)):  # the last one first: this thread may make its request
                try:
                    receive(shard)
                except self._retried as error:
                    failures[shard] = error.with_traceback(None)
            for shard, failure in sorted(failures.items()):
                self._retry(partial(retry, shard), failure)
        except BaseException:
            for request in pending.values():
                request.cancel()
            raise
        return tuple(answers[shard] for shard in range(shards))

    def _retry(self, request: Callable[[], None], error: ParashardError) -> None:
        """Retry a shard's request after an error, until it answers or the budget is spent."""
        if self._cancelled.is_set() or not self._retry_budget_s:
            raise error
        since_s = self._now_s()
        until_s = since_s + self._retry_budget_s
        self._refresh_view(error)

        def refresh_view(state: tenacity.RetryCallState) -> None:
            assert state.outcome is not None
            self._refresh_view(state.outcome.exception())

        def pause_s(_: tenacity.RetryCallState) -> float:
            longest_s = min(RETRY_PAUSE_SHARE * (self._now_s() - since_s), RETRY_PAUSE_MAX_S)
            return max(RETRY_PAUSE_S, random.uniform(longest_s / 2, longest_s))  # so that clients do not retry together

        tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(self._retried),
            wait=pause_s,
            sleep=tenacity.sleep_using_event(self._cancelled),
            stop=lambda _: self._cancelled.is_set() or self._now_s() >= until_s,
            before_sleep=refresh_view,
            reraise=True,
        )(request)

    def _refresh_view(self, error: BaseException | None) -> None:
        """Update the shards' addresses, unless the shard is only full."""
        if self._refresh is not None and not isinstance(error, QueueFull):
            self._refresh()
