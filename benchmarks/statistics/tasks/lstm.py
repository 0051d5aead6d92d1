"""An LSTM that reads characters of Python's manual: AdamW; staleness costs it loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import parashard as ps
from benchmarks.statistics.tasks._characters import lines, loss
from benchmarks.statistics.trial import Trial

CHARACTERS, CONTEXT, WIDTH, HIDDEN = 200_000, 32, 32, 96


class Reader(torch.nn.Module):
    """An embedding, an LSTM, and a linear layer to the next character."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(alphabet, WIDTH)
        self.lstm = torch.nn.LSTM(WIDTH, HIDDEN, batch_first=True)
        self.out = torch.nn.Linear(HIDDEN, alphabet)

    def forward(self, characters: Any) -> Any:
        """Return the logits of each next character."""
        return self.out(self.lstm(self.embedding(characters))[0])


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    torch.manual_seed(seed)
    alphabet, train, held_out = lines(CHARACTERS, CONTEXT)
    return Trial(
        model=ps.torch.Model(Reader(alphabet), loss),
        optimizer=ps.AdamW(2e-2, weight_decay=0.01),
        train=train,
        held_out=held_out,
        epochs=5,
        batch_size=64,
        metric="loss",
        higher_is_better=False,
        tolerance=0.01,
    )
