"""Here: a fit in the process that calls it, by `parashard.api.in_process`, which is imported when it trains.

Called by `parashard.api.trainer`.
"""

from __future__ import annotations

from typing import Any

from parashard.api.fits import Fit, FitCall
from parashard.api.script import SCRIPT
from parashard.api.strategies import InProcessStrategy
from parashard.errors import ConfigurationError


class Here:
    """The place of a fit in this process, as `parashard.api.fits.Place`.

    Parameters
    ----------
    strategy : InProcessStrategy
        On what device.
    """

    def __init__(self, strategy: InProcessStrategy) -> None:
        self._strategy = strategy

    @property
    def runs_script(self) -> bool:
        """False: there are no workers."""
        return False

    def enter(self, call: FitCall) -> FitCall:
        """Refuse a worker: this call has none; try the model."""
        if SCRIPT.is_worker:
            raise ConfigurationError(
                f"this call trains in its own process, by {type(self._strategy).__name__}, in this worker, and by "
                "worker processes in the one that started it: a script makes the same calls wherever it runs"
            )
        call.present.try_step(call.source, call.loaded.job, call.pieces)
        return call

    def train(self, fit: Fit) -> dict[str, Any]:
        """Train by this process's own shard and replicas."""
        from parashard.api.in_process.training import train

        return train(fit, self._strategy)
