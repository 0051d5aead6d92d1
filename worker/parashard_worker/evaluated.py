"""Stores the weights of an evaluation before its result is reported: what is best is then what was judged.

Knows the checkpoint store, and no lease. Called by `parashard_worker.loop`, through `parashard_worker.worker`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from parashard.checkpoints.catalogue import evaluated_name
from parashard.errors import ParashardError
from parashard.plan.variables import Float32s, Variable, as_exported
from parashard.process.logs import log


def keep_evaluated(
    checkpoint_url: str, variables: Mapping[str, Variable], evaluation: int, values: Mapping[str, Float32s]
) -> str:
    """Store weights under a name of their own and return it; "" where that fails (P21), which is logged.

    The file is what a user is given: counters are whole numbers in it, as in `weights.safetensors`.

    Parameters
    ----------
    checkpoint_url : str
        The run's checkpoint store.
    variables : mapping of str to Variable
        What the values are of.
    evaluation : int
        The number of steps after which it was due.
    values : mapping of str to ndarray of float32
        Every variable; only read.
    """
    from parashard.store import open_store
    from parashard.store.arrays import to_bytes

    name = evaluated_name(evaluation, os.urandom(4).hex())
    arrays = {variable: np.ascontiguousarray(value) for variable, value in as_exported(values, variables).items()}
    try:
        open_store(checkpoint_url).create(name, to_bytes(arrays))
    except ParashardError as error:
        log.warning("evaluated-not-stored", evaluation=evaluation, error=str(error))
        return ""
    return name
