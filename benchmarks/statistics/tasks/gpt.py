"""A small GPT that reads characters of Python's manual: AdamW, warm-up, cosine, clipping; staleness costs it loss."""

from __future__ import annotations

from pathlib import Path

import torch

import parashard as ps
from benchmarks.statistics.tasks._characters import lines, loss
from benchmarks.statistics.tasks._transformer import Transformer
from benchmarks.statistics.trial import Trial

CHARACTERS, CONTEXT, WIDTH, HEADS, LAYERS = 200_000, 32, 64, 4, 2


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    torch.manual_seed(seed)
    alphabet, train, held_out = lines(CHARACTERS, CONTEXT)
    schedule = {"kind": "cosine", "warmup_steps": 40, "final_fraction": 0.1}
    return Trial(
        model=ps.torch.Model(Transformer(alphabet, CONTEXT, WIDTH, HEADS, LAYERS), loss),
        optimizer=ps.AdamW(6e-3, weight_decay=0.1, beta2=0.99, clip_norm=1.0, schedule=schedule),
        train=train,
        held_out=held_out,
        epochs=4,
        batch_size=64,
        metric="loss",
        higher_is_better=False,
        tolerance=0.01,
    )
