"""Asking every shard the same, and those again that ask for patience.

Owns the order of beginning, waiting and retrying, and how long is retried. Knows neither pushes nor pulls. Called by
`parashard.client.shard_client`, from many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity

from parashard.errors import RetryLater, Unreachable
from parashard.transports.base import Pending

RETRY_PAUSE_S = 0.02
RETRY_PAUSE_MAX_S = 1.0

_Answer = TypeVar("_Answer")


class _StopWhenAway(tenacity.stop.stop_base):
    """Retry no more once nobody has answered for so long."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        nobody = retry_state.outcome is not None and isinstance(retry_state.outcome.exception(), Unreachable)
        return nobody and (retry_state.seconds_since_start or 0.0) >= self._budget_s


class Asking:
    """How requests to all shards are made.

    Parameters
    ----------
    retry_budget_s : float
        How long one message may be sent again while a shard asks for patience.
    away_budget_s : float
        How long it may be sent again while nobody answers.
    giving_up : Event
        Once set, nothing is retried any more.
    """

    def __init__(self, retry_budget_s: float, away_budget_s: float, giving_up: threading.Event) -> None:
        self._retry_budget_s = retry_budget_s
        self._away_budget_s = away_budget_s
        self._giving_up = giving_up

    def of_all(
        self,
        begin: Callable[[int], Pending[_Answer]],
        shards: int,
        settled: Callable[[int, _Answer], None] = lambda shard, answer: None,
        unacknowledged: Callable[[int], None] = lambda shard: None,
    ) -> tuple[_Answer, ...]:
        """Begin a request on every shard, then wait for each; shards that ask for patience are asked again after that.

        Only after that: whoever tries again while it holds another shard's connection, or its room, and waits for one
        that somebody holds who waits for the first, would stand still. After an error nothing is under way any more.

        Parameters
        ----------
        begin : callable
            Begins the request to a shard, by index.
        shards : int
            How many there are.
        settled : callable
            Told of every answer, with the shard's index.
        unacknowledged : callable
            Told of a request that may have reached its shard and was not answered.

        Returns
        -------
        tuple
            The answers, by shard.

        Raises
        ------
        ParashardError
            The first that a shard answers with, or `RetryLater` once the budget is spent.
        """
        begun: list[Pending[_Answer] | None] = []
        answers: dict[int, _Answer] = {}
        try:
            begun.extend(self._begun(begin, shard) for shard in range(shards))
            for shard, pending in enumerate(begun):
                answer = None if pending is None else self._heard(pending, shard, unacknowledged)
                if answer is not None:
                    answers[shard] = answer
                    settled(shard, answer)
            for shard in range(shards):
                if shard not in answers:
                    answers[shard] = self._patiently(begin, shard, unacknowledged)
                    settled(shard, answers[shard])
        except BaseException:
            for pending in begun:
                if pending is not None:
                    pending.cancel()
            raise
        return tuple(answers[shard] for shard in range(shards))

    def _begun(self, begin: Callable[[int], Pending[_Answer]], shard: int) -> Pending[_Answer] | None:
        """Begin; None if the shard asks for patience: the others need not wait for it."""
        try:
            return begin(shard)
        except RetryLater:
            return None

    def _heard(self, pending: Pending[_Answer], shard: int, unacknowledged: Callable[[int], None]) -> _Answer | None:
        """Wait for an answer; None if the shard asks for patience."""
        try:
            return _answered(pending, shard, unacknowledged)
        except RetryLater:
            return None

    def _patiently(
        self, begin: Callable[[int], Pending[_Answer]], shard: int, unacknowledged: Callable[[int], None]
    ) -> _Answer:
        """Ask a shard again until it answers or the budget is spent."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(RetryLater),
            wait=tenacity.wait_random_exponential(RETRY_PAUSE_S, RETRY_PAUSE_MAX_S),
            sleep=tenacity.sleep_using_event(self._giving_up),
            stop=tenacity.stop_after_delay(self._retry_budget_s)
            | tenacity.stop_when_event_set(self._giving_up)
            | _StopWhenAway(self._away_budget_s),
            reraise=True,
        )
        return retrying(lambda: _answered(begin(shard), shard, unacknowledged))


def _answered(pending: Pending[_Answer], shard: int, unacknowledged: Callable[[int], None]) -> _Answer:
    try:
        return pending.result()
    except RetryLater as error:
        pending.cancel()  # what it may still have under way must not fill the same arrays
        if isinstance(error, Unreachable):
            unacknowledged(shard)
        raise
