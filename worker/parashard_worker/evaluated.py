"""Stores the weights of an evaluation before its result is reported: what is best is then what was judged.

Knows the checkpoint store, and no lease. Called by `parashard_worker.loop`, through `parashard_worker.worker`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue, evaluated_name
from parashard.errors import ParashardError
from parashard.plan.variables import Float32s, Variable, as_exported
from parashard.process.logs import log
from parashard.store import open_store
from parashard.store.arrays import to_bytes


def keep_evaluated(
    checkpoint_url: str, run_id: str, variables: Mapping[str, Variable], evaluation: int, values: Mapping[str, Float32s]
) -> str:
    """Store weights under a name of their own and return it; "" where that fails (P21), which is logged.

    Nothing is written where the store is not the run's, as in a folder of the same name on another machine.

    The file is what a user is given: counters are whole numbers in it, as in `weights.safetensors`.

    Parameters
    ----------
    checkpoint_url : str
        The run's checkpoint store.
    run_id : str
        The run.
    variables : mapping of str to Variable
        What the values are of.
    evaluation : int
        The number of steps after which it was due.
    values : mapping of str to ndarray of float32
        Every variable; only read.
    """
    name = evaluated_name(evaluation, os.urandom(4).hex())
    arrays = {variable: np.ascontiguousarray(value) for variable, value in as_exported(values, variables).items()}
    try:
        store = open_store(checkpoint_url)
        Catalogue(store).of_run(run_id)
        store.create(name, to_bytes(arrays))
    except ParashardError as error:
        log.warning("evaluated-not-stored", evaluation=evaluation, error=str(error))
        return ""
    return name


def check_store(reply: pb.GetJobReply) -> None:
    """Raise ConfigurationError where this worker could not store the weights that the run's callbacks keep."""
    if reply.stores_evaluated:
        Catalogue(open_store(reply.checkpoint_url)).of_run(reply.run_id)
