"""DecisionStore: stores the state that a later coordinator of the run needs, decisions before they take effect.

Owns when that state is stored, and whether this process ends if that fails or if a later coordinator has claimed the
run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from parashard.errors import NotReady, StoreFailed, Superseded
from parashard.process.backoff import STEADY_S
from parashard.process.best_effort import BestEffort
from parashard.process.logs import log
from parashard.process.shell import ExitCode
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.saved import Saved
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.run.store import RunStore

DECISION_RETRY_S_MAX = 20.0  # how long storing such a decision is retried before this process ends
DECISION_PAUSE_S = 0.5


class DecisionStore:
    """Stores the state of a job for a later coordinator."""

    def __init__(self, core: ExclusiveCore, run_store: RunStore, on_trouble: Callable[[str, bool], None]) -> None:
        self._core = core
        self._run_store = run_store
        self._saving = BestEffort("the coordinator's records", on_trouble, STEADY_S)
        self._saved: Saved | None = None
        self._stored: Saved = core.run_exclusive(lambda core, _: core.job.saved())
        core.on_decision = self._save_decision

    @property
    def error(self) -> str:
        """Why the state is not stored at present, or ""."""
        return self._saving.error

    @property
    def failures(self) -> int:
        """Failed attempts in a row."""
        return self._saving.failures

    def save_if_changed(self) -> None:
        """Store changed state; raise `Superseded` if there is a later coordinator."""
        # Under the core's lock: an older state must not replace a decision that is stored concurrently.

        def save(core: Core, _: float) -> None:
            saved = core.job.saved()
            if saved == self._saved:
                self.check_claim()
                core.job.mark_stored()
            else:
                self._save(core, saved)

        self._core.run_exclusive(save)

    def _save(self, core: Core, saved: Saved) -> bool:
        if not self._saving.attempt(lambda: self._run_store.save(saved)):
            return False
        self._saved = self._stored = saved
        core.job.mark_stored()
        return True

    def check_claim(self) -> None:
        """Raise `Superseded` if a later coordinator has claimed the run; an error of the store is ignored."""
        with suppress(StoreFailed):
            self._run_store.check_newest()

    def _save_decision(self, core: Core) -> None:
        """Store a decision before it takes effect; under the core's lock, so that no other call intervenes.

        A failing store does not block work: a result, a stop or a scaling, which a later coordinator can derive again,
        is stored later. A step must not be skipped by one coordinator and computed by another, nor have two learning
        rates, nor be leased if a later coordinator could still change its rate, and the report must have every lag.
        If such a decision cannot be stored for DECISION_RETRY_S_MAX, or a later coordinator exists, this process ends
        before the decision is visible.

        Raises `NotReady` to a worker whose arithmetic would have become the job's: it joins again.
        """
        deadline_s = time.monotonic() + DECISION_RETRY_S_MAX
        try:
            while not self._save(core, core.job.saved()):
                if self._critical_decisions_stored(core):
                    break
                if time.monotonic() > deadline_s:
                    _give_up("decision-not-stored", self.error, ExitCode.RETRY)
                time.sleep(DECISION_PAUSE_S)
            else:
                return
        except Superseded as error:
            _give_up("superseded", str(error), ExitCode.FENCED)
        if core.job.options.same_arithmetic and core.job.workers.fingerprint != self._stored.fingerprint:
            core.job.workers.fingerprint = self._stored.fingerprint
            raise NotReady(f"the coordinator's store does not work: {self.error}")

    def _critical_decisions_stored(self, core: Core) -> bool:
        """Tell whether all skips, learning rates, the limit `leased_to` and lags are stored (P7, P37)."""
        progress, controller = core.job.callback_progress, core.job.controller
        return (
            core.job.leases.skips <= set(self._stored.skips)
            and progress.decided <= self._stored.rates_decided
            and progress.leased_to <= self._stored.leased_to
            and (controller is None or len(controller.lags) <= len(self._stored.lags))
        )


def _give_up(event: str, error: str, code: ExitCode) -> NoReturn:
    """End this process at once, before its decision takes effect."""
    try:
        log.critical(event, error=error)
    finally:
        os._exit(code)  # even if the log cannot be written
