"""Here: a fit in the process that calls it, by `parashard.api.in_process`, which is imported when it trains.

Called by `parashard.api.trainer`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from parashard.api.callback_follower import CallbackFollower
from parashard.api.fits import FitCall
from parashard.api.strategies import InProcessStrategy
from parashard.display.live import JobView
from parashard.errors import ConfigurationError
from parashard.launch.runs import Run


class Here:
    """Trains a fit in this process, as `parashard.api.fits.FitBackend`.

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

    def work(self, call: FitCall) -> NoReturn:
        """Refuse a worker: this call has none."""
        raise ConfigurationError(
            f"this call trains in its own process, by {type(self._strategy).__name__}, in this worker, and by "
            "worker processes in the one that started it: a script makes the same calls wherever it runs"
        )

    def checked(self, call: FitCall) -> FitCall:
        """Try the model."""
        call.present.try_step(call.source, call.loaded.job, call.pieces)
        return call

    def train(self, call: FitCall, run: Run, view: JobView, follower: CallbackFollower) -> dict[str, Any]:
        """Train by this process's own shard and replicas."""
        from parashard.api.in_process.training import train

        return train(call, run, view, follower, self._strategy)
