"""A small GPT that reads characters of Python's manual: AdamW, warm-up, cosine, clipping; staleness costs it loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import parashard as ps
from benchmarks.statistics.tasks._characters import lines, loss
from benchmarks.statistics.trial import Trial

CHARACTERS, CONTEXT, WIDTH, HEADS, LAYERS = 200_000, 32, 64, 4, 2


class Block(torch.nn.Module):
    """Attention to the characters before, then two dense layers, each after a norm and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        dense = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.dense = nn.Sequential(nn.LayerNorm(WIDTH), *dense)

    def forward(self, x: Any) -> Any:
        """Return the block's output."""
        heads = self.attention(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        return x + self.dense(x)


class Transformer(torch.nn.Module):
    """Embeddings of characters and places, blocks, and the same embedding back to characters."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.characters = torch.nn.Parameter(0.02 * torch.randn(alphabet, WIDTH))
        self.places = torch.nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)), torch.nn.LayerNorm(WIDTH))

    def forward(self, characters: Any) -> Any:
        """Return the logits of each next character."""
        return self.blocks(self.characters[characters] + self.places) @ self.characters.T


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    torch.manual_seed(seed)
    alphabet, train, held_out = lines(CHARACTERS, CONTEXT)
    schedule = {"kind": "cosine", "warmup_steps": 40, "final_fraction": 0.1}
    return Trial(
        model=ps.torch.Model(Transformer(alphabet), loss),
        optimizer=ps.AdamW(6e-3, weight_decay=0.1, beta2=0.99, clip_norm=1.0, schedule=schedule),
        train=train,
        held_out=held_out,
        epochs=4,
        batch_size=64,
        metric="loss",
        higher_is_better=False,
        tolerance=0.01,
    )
