"""Parts of batches: the examples of a step, and what share its gradient has in that of its batch.

Invariant: the sum over the parts of a batch of share * gradient is the gradient of the whole batch. Called by
`parashard_worker.computing`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from parashard.data.base import Batch, DataSource, examples_of
from parashard.data.tree import map_leaves, rows_of
from parashard.models.base import Model, adds_losses
from parashard.plan.steps import StepPlan


def read_step(model: Model, source: DataSource, steps: StepPlan, step: int) -> Batch:
    """Read the examples of a step: of its part of the batch, where these say all, else the batch is read and cut.

    Of a part in which no example counts, such as one whose targets are all ignored, none is returned: its own loss
    divides by zero.
    """
    number, epoch, indices = steps.steps_before + step, steps.epoch_of(step), steps.indices(step)
    if steps.parts == 1:
        return Batch(number, epoch, indices, *examples_of(source, number, indices))
    if not len(indices):
        return Batch(number, epoch, indices, np.empty((0, 1), np.float32), np.empty(0, np.float32))
    if not steps.batched:
        part = Batch(number, epoch, indices, *examples_of(source, number, indices))
        if counts_rows(model, part):
            return replace(part, share=1.0 if adds_losses(model) else steps.share(step))
    whole_indices = steps.indices_of_batch(step)
    drawn_by = number - step % steps.parts  # what is random in a batch must be the same for each of its parts
    whole = Batch(number, epoch, whole_indices, *examples_of(source, drawn_by, whole_indices))
    part = _rows_of(whole, steps.rows_of_part(step, rows_of(whole.inputs)))
    share = share_of(model, part, whole)
    return replace(part, share=share) if share > 0 else _rows_of(whole, slice(0))  # NaN: nothing of the batch counts


def counts_rows(model: Model, part: Batch) -> bool:
    """Tell whether the share of a part is that of its examples, or 1, whatever the others of the batch are."""
    of_model = getattr(model, "counts_rows", None)
    return of_model is None or adds_losses(model) or bool(of_model(part))


def share_of(model: Model, part: Batch, whole: Batch) -> float:
    """Return what the gradient of a part counts in that of the batch."""
    if not rows_of(part.inputs):
        return 0.0
    if adds_losses(model):
        return 1.0
    of_model = getattr(model, "share", None)
    return rows_of(part.inputs) / rows_of(whole.inputs) if of_model is None else float(of_model(part, whole))


def _rows_of(batch: Batch, rows: slice) -> Batch:
    inputs, targets = map_leaves(lambda array: array[rows], (batch.inputs, batch.targets))
    weights = None if batch.weights is None else batch.weights[rows]
    indices = batch.indices[rows] if len(batch.indices) == rows_of(batch.inputs) else batch.indices
    return replace(batch, indices=indices, inputs=inputs, targets=targets, weights=weights)
