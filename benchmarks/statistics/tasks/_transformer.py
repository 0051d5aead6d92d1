"""A GPT of characters: of any width, heads and layers."""

from __future__ import annotations

from typing import Any

import torch

import parashard as ps
from benchmarks.statistics.tasks._characters import lines, loss
from benchmarks.statistics.trial import Trial

CONTEXT, HEADS = 32, 4


class Block(torch.nn.Module):
    """Attention to the characters before, then two dense layers, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        nn = torch.nn
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        dense = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.dense = nn.Sequential(nn.LayerNorm(width), *dense)

    def forward(self, x: Any) -> Any:
        """Return the block's output."""
        heads = self.attention(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        return x + self.dense(x)


class Transformer(torch.nn.Module):
    """Embeddings of characters and places, blocks, and the same embedding back to characters."""

    def __init__(self, alphabet: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.characters = torch.nn.Parameter(0.02 * torch.randn(alphabet, width))
        self.places = torch.nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = torch.nn.Sequential(*(Block(width, heads) for _ in range(layers)), torch.nn.LayerNorm(width))

    def forward(self, characters: Any) -> Any:
        """Return the logits of each next character."""
        return self.blocks(self.characters[characters] + self.places) @ self.characters.T


def reader(seed: int, *, characters: int, width: int, layers: int, rate: float, epochs: int) -> Trial:
    """Return the trial of a GPT that reads characters of Python's manual: AdamW, warm-up, cosine, clipping."""
    torch.manual_seed(seed)
    alphabet, train, held_out = lines(characters, CONTEXT)
    schedule = {"kind": "cosine", "warmup_steps": 40, "final_fraction": 0.1}
    return Trial(
        model=ps.torch.Model(Transformer(alphabet, CONTEXT, width, HEADS, layers), loss),
        optimizer=ps.AdamW(rate, weight_decay=0.1, beta2=0.99, clip_norm=1.0, schedule=schedule),
        train=train,
        held_out=held_out,
        epochs=epochs,
        batch_size=64,
        metric="loss",
        higher_is_better=False,
        tolerance=0.01,
    )
