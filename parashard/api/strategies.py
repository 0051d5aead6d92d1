"""Strategies: on which processes a trainer's steps are computed, and how far they may run apart."""

from __future__ import annotations

from typing import Any


class ParameterServerStrategy:
    """Shards hold the variables, workers pull them and push gradients.

    Parameters
    ----------
    shards, workers : int
        Processes to start.
    consistency : str
        async; ssp:K, in which no step runs more than K ahead of the slowest; sync:N, in rounds of N steps.
    **cluster
        Further keys of a job file's `[cluster]` table, such as transport="tcp".
    """

    def __init__(self, shards: int = 2, workers: int = 2, consistency: str = "async", **cluster: Any) -> None:
        self.consistency = consistency
        self.cluster: dict[str, Any] = {"shards": shards, "workers": workers, **cluster}
