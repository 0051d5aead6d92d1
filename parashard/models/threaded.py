"""What a worker that is a thread computes with: a model that shares with others only what threads may share.

Called by `parashard.api.worker_threads`, and by models of models.
"""

from __future__ import annotations

import copy

from parashard.errors import ConfigurationError
from parashard.models.base import Model, Threaded
from parashard.models.user_errors import named_with_line
from parashard.process.model_lock import holding_model_lock


def for_thread(model: Model) -> Model:
    """Return a model of one thread's own: what it says itself, else a deep copy.

    Raises
    ------
    ConfigurationError
        If it cannot be copied.
    """
    with holding_model_lock():  # built one after the other
        if isinstance(model, Threaded):
            return model.for_thread()
        try:
            return copy.deepcopy(model)
        except Exception as error:
            raise ConfigurationError(
                f"worker threads need a model each, and {type(model).__name__} cannot be copied: "
                f"{named_with_line(error)}; give it a method for_thread() that returns another one, or itself if "
                "threads may share it"
            ) from error
