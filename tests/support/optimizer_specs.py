"""Every optimizer with settings that all its terms need, and the names of its slots."""

from __future__ import annotations

from parashard.plan.optimizers import FTRL, LAMB, SGD, Adagrad, Adam, AdamW, Momentum, Nesterov, OptimizerSpec, RMSProp

SPECS: dict[str, tuple[OptimizerSpec, tuple[str, ...]]] = {
    spec.rule: (spec, slots)
    for spec, slots in (
        (SGD(learning_rate=0.1, weight_decay=0.1), ()),
        (Momentum(learning_rate=0.1, weight_decay=0.1), ("velocity",)),
        (Nesterov(learning_rate=0.1, weight_decay=0.1), ("velocity",)),
        (Adagrad(learning_rate=0.1, weight_decay=0.1, initial_accumulator=0.25), ("accumulator",)),
        (RMSProp(weight_decay=0.1), ("mean_square",)),
        (RMSProp(weight_decay=0.1, momentum=0.5), ("mean_square", "velocity")),
        (RMSProp(weight_decay=0.1, centered=True), ("mean_square", "mean", "velocity")),
        (Adam(weight_decay=0.1), ("m", "v")),
        (AdamW(weight_decay=0.1), ("m", "v")),
        (FTRL(learning_rate=0.1, weight_decay=0.1, l1=0.05, l2=0.3), ("z", "n")),
        (LAMB(learning_rate=0.1, weight_decay=0.1), ("m", "v")),
    )
}
