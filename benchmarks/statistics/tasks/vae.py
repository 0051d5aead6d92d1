"""A variational autoencoder of MNIST's digits, as PyTorch's example: Adam; staleness costs it loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import parashard as ps
from benchmarks.frameworks.mnist import PIXELS
from benchmarks.statistics.tasks._digits import digits
from benchmarks.statistics.trial import Trial

TRAIN, HELD_OUT, HIDDEN, LATENT = 8000, 2000, 200, 10


class Autoencoder(torch.nn.Module):
    """An encoder to a mean and a variance, and a decoder of a draw, or of the mean where nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.encoder = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS))

    def forward(self, images: Any) -> Any:
        """Return the logits of the pixels, the mean and the logarithm of the variance."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        return self.decoder(drawn), mean, log_variance


def loss(outputs: Any, images: Any) -> Any:
    """Return the negative evidence lower bound of an image, in nats."""
    logits, mean, log_variance = outputs
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return (entropy + divergence).mean()


def make(seed: int, data: Path | None) -> Trial:
    """Return the trial of a seed."""
    torch.manual_seed(seed)
    images, _ = digits(data, "train", slice(TRAIN))
    held_out, _ = digits(data, "t10k", slice(HELD_OUT))
    return Trial(
        model=ps.torch.Model(Autoencoder(), loss),
        optimizer=ps.Adam(5e-3),
        train=(images, images),
        held_out=(held_out, held_out),
        epochs=5,
        batch_size=64,
        metric="loss",
        higher_is_better=False,
        tolerance=0.01,
    )
