"""Lines of characters of Python's own manual, which every installation has, for models of language."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

EVERY = 10
"""Every tenth line is held out."""


def lines(characters: int, context: int) -> tuple[int, tuple[Any, Any], tuple[Any, Any]]:
    """Return the size of the alphabet, training lines and held-out ones: each with the same line one character on."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))[:characters]
    alphabet = sorted(set(text))
    numbers = np.array([alphabet.index(character) for character in text], np.int64)
    rows = numbers[: (len(numbers) - 1) // context * context + 1]
    x, y = rows[:-1].reshape(-1, context), rows[1:].reshape(-1, context)
    held = np.arange(len(x)) % EVERY == 0
    return len(alphabet), (x[~held], y[~held]), (x[held], y[held])


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of all characters."""
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
