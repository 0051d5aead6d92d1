"""PyTorch's DataLoader: what of it is used, and why another is refused.

A loader's dataset, batch size and `collate_fn` are used; the order is the job's own, and workers read for themselves.
Imports no PyTorch: a loader comes with it. Called by `parashard.api.examples`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from parashard.errors import BadData


class Unwrapped(NamedTuple):
    """What of a loader is used; `collate` is None where items are only stacked, `drop_last` of a shorter last batch."""

    dataset: Any
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    drop_last: bool


def is_loader(data: Any) -> bool:
    """Tell whether something is a DataLoader of PyTorch."""
    loading = sys.modules.get("torch.utils.data")
    return loading is not None and isinstance(data, loading.DataLoader)


def unwrapped(loader: Any, what: str) -> Unwrapped:
    """Return what of a loader is used.

    Raises
    ------
    BadData
        If its batches are not those of a job: each example of a dataset with a length once in each epoch.
    """
    torch_data: Any = sys.modules["torch.utils.data"]
    instead = "pass its dataset, with batch_size="
    if isinstance(loader.dataset, torch_data.IterableDataset):
        raise BadData(
            f"{what}: the DataLoader's dataset can only be iterated, and a step names its examples by index: pass "
            "ps.cached(dataset, folder), which writes the examples once"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not torch_data.BatchSampler:
        raise BadData(f"{what}: the DataLoader makes its batches itself (batch_sampler, or no batch_size): {instead}")
    sampler = loader.sampler
    plain = type(sampler) is torch_data.SequentialSampler or (
        type(sampler) is torch_data.RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)
    )
    if not plain:
        raise BadData(
            f"{what}: the DataLoader's sampler is {type(sampler).__name__}, and a job has each example once in each "
            f"epoch, in an order of its own: {instead}, or a torch.utils.data.Subset"
        )
    collate = None if loader.collate_fn is torch_data.default_collate else loader.collate_fn
    return Unwrapped(loader.dataset, loader.batch_size, collate, bool(loader.drop_last))
