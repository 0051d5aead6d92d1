"""Splitting: into how many parts a script's batches are split in `auto`, so that each worker computes one.

Invariant: the sum of the parts' gradients is the gradient of the batch. Where that cannot be, or a part cannot be
computed, a batch has one part. Called by `parashard.api.fit_on_cluster`.
"""

from __future__ import annotations

import numpy as np

from parashard.api.fits import FitCall
from parashard.api.tracebacks import warn
from parashard.data.base import examples_of
from parashard.data.tree import rows_of
from parashard.errors import ConfigurationError
from parashard.job.policy import Policy
from parashard.plan.steps import parts_of_batch


def tried(call: FitCall) -> FitCall:
    """Try the model on a step, and return the call with the parts of its batches.

    Raises
    ------
    ConfigurationError
        If the model cannot compute whole batches either, or the call names a number of parts that cannot be.
    """
    loaded, source = call.loaded, call.source
    policy = loaded.job.consistency.policy
    if loaded.is_open and source.spec.batched:
        rows = rows_of(examples_of(source, 0, np.zeros(1, np.int64))[0])
        policy = Policy("auto", parts_of_batch(loaded.job.cluster.workers, rows))
        loaded = loaded.with_policy(policy)
    if policy.parts > 1:
        why = _why_whole(call, policy)
        if not why:
            return call._replace(loaded=loaded)
        if not loaded.is_open:
            raise ConfigurationError(
                f"consistency is {policy}: {why}; name no number of parts, and each batch is computed by one worker"
            )
        loaded = loaded.with_policy(Policy("auto", 1))
        call.present.try_step(source, loaded.job, call.pieces)
        warn(f"each batch is computed by one worker, and the others wait for it: {why}")
        return call._replace(loaded=loaded)
    call.present.try_step(source, loaded.job, call.pieces)
    return call._replace(loaded=loaded)


def _why_whole(call: FitCall, policy: Policy) -> str:
    """Return why batches cannot be split; "": they can."""
    try:
        is_mean = call.present.try_step(call.source, call.loaded.with_policy(policy).job, call.pieces)
    except ConfigurationError as error:
        return f"a part of a batch cannot be computed by itself ({error})"
    return "" if is_mean else "the loss of a batch is not the mean over its examples"
