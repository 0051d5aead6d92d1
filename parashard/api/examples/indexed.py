"""Data of a script's trainer calls as examples by index; and errors for arguments that a call does not have."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from parashard.api.examples.arrays import ArrayExamples, arrays_of, tree_of
from parashard.api.examples.datasets import DatasetExamples, Targets, named_parts
from parashard.data.base import BadExample
from parashard.data.tree import Tree, leaves, map_leaves
from parashard.errors import BadData, ConfigurationError

Collate = Callable[[list[Any]], Any]
_EVALUATION = 'the Trainer has settings={"evaluation.every_epochs": ...}'
_ELSEWHERE = {
    "validation_freq": _EVALUATION,
    "check_val_every_n_epoch": _EVALUATION,
    "val_check_interval": f"{_EVALUATION}, a fraction of an epoch, too",
    "validation_batch_size": "an evaluation's figures do not depend on it",
    "workers": "ps.ParameterServerStrategy(workers=...) has it",
    "optimizer": "the Trainer has it",
    "max_epochs": "it is epochs= of fit",
    "max_steps": "steps_per_epoch= times epochs= of fit is as many",
    "limit_train_batches": "it is steps_per_epoch= of fit",
    "limit_val_batches": "it is validation_steps= of fit",
    "fast_dev_run": "fit has epochs=1, steps_per_epoch= and validation_steps=",
    "accumulate_grad_batches": "it is gradient_accumulation= of fit",
    "gradient_clip_val": "it is clip_norm= of the optimizer, such as ps.Adam(1e-3, clip_norm=1.0)",
    "gradient_clip_algorithm": "the optimizer has clip_norm= and clip_value=",
    "ckpt_path": "resume=True goes on with this script's newest run",
    "train_dataloaders": "it is the first argument",
    "val_dataloaders": "it is validation_data= of fit",
    "precision": "ps.torch.Model has autocast=",
    "accelerator": "a strategy has device= or devices=",
    "devices": "a strategy has workers= or devices=",
    "logger": "fit has callbacks=[ps.callbacks.CSVLogger(...)], or TensorBoard",
    "default_root_dir": "runs are in the folder runs of the working directory",
    "loss": "the model has it: ps.torch.Model(net, loss=...)",
    "metrics": "the model has it: ps.torch.Model(net, loss=..., metrics=[...])",
    "lr": "the optimizer has it: ps.Adam(1e-3)",
    "dataloaders": "it is the first argument",
    "steps": "all examples are judged; give fewer of them",
    "callbacks": "fit has them",
}
"""Where arguments of Keras and Lightning are in parashard."""


Indexed = ArrayExamples | DatasetExamples
"""Examples by index."""


@contextmanager
def as_bad_data() -> Iterator[None]:
    """Convert BadExample to BadData: outside a job a retry would not help."""
    try:
        yield
    except BadExample as error:
        raise BadData(error.message) from None


def indexed(data: Any, what: str, *, targets: Targets = None, sample_weight: Any = None) -> Indexed:
    """Return the examples of data with targets; raise BadData, or BadExample for the first one, if unusable."""
    if sample_weight is not None:
        if not isinstance(data, tuple | list) or _is_listed(data) or len(data) != 2:
            raise BadData(
                "sample_weight is for a pair (inputs, targets) of arrays; an example of a dataset has its weight as "
                "a third item: (inputs, targets, weight)"
            )
        data = (*data, sample_weight)
    found = _dataset(data, what, targets, inputs_only=False)
    if found is not None:
        return found
    pandas = sys.modules.get("pandas")
    if isinstance(data, Mapping) or (pandas is not None and isinstance(data, pandas.DataFrame)):
        return arrays_of(named_parts(data, targets, what), what)
    if targets is not None:
        raise BadData(
            f"targets= names fields of a dict, a table or a dataset of dicts; {what} is {type(data).__name__}"
        )
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        kind = f"{type(data).__name__} of {len(data)}" if isinstance(data, tuple | list) else type(data).__name__
        raise BadData(
            f"{what} must be a pair (inputs, targets) of arrays, found {kind}; or (inputs, targets, weights), or a "
            "dataset with a length whose items are such"
        )
    return arrays_of(data, what)


def indexed_inputs(inputs: Any, what: str) -> Indexed:
    """Return the examples of inputs; targets in a dataset's items are dropped."""
    found = _dataset(inputs, what, None, inputs_only=True)
    if found is not None:
        check_all(found, what)
        return found
    tree = tree_of(inputs, what)
    if len({len(array) for _, array in leaves(tree)}) > 1:
        counts = " and ".join(f"{len(array):,} {name}" for name, array in leaves(tree, what))
        raise BadData(f"{what} have equally many rows, found {counts}")
    return ArrayExamples(tree)


def check_all(examples: Indexed, what: str) -> None:
    """Refuse data with `drop_last` that omit some examples, where every example is evaluated."""
    if examples.drop_last and len(examples) % (examples.batch_size or 1):
        raise BadData(
            f"{what}: the DataLoader drops the last {len(examples) % (examples.batch_size or 1)} of {len(examples):,} "
            "examples (drop_last), and only training may: pass its dataset, or a torch.utils.data.Subset"
        )


def joined(parts: list[Tree]) -> Tree:
    """Concatenate the outputs of pieces, leaf by leaf."""
    for name, leaf in leaves(parts[0], "outputs"):
        if not isinstance(leaf, np.ndarray) or not leaf.ndim:
            raise ConfigurationError(f"predict: {name} is {type(leaf).__name__}; due is an array with a row an example")
    try:
        return map_leaves(lambda *arrays: np.concatenate(arrays), *parts)
    except (ValueError, KeyError):
        shapes = [[array.shape for _, array in leaves(part)] for part in parts[:2]]
        raise ConfigurationError(
            f"predict: outputs of different batches do not go together, such as those of shapes {shapes}"
        ) from None


def _dataset(data: Any, what: str, targets: Targets, *, inputs_only: bool) -> Indexed | None:
    """Return the examples of a dataset; None for any other object, which the caller checks as arrays."""
    keras: Any = sys.modules.get("keras")
    if keras is not None and isinstance(data, keras.utils.PyDataset):
        _check_py_dataset(keras.utils.PyDataset, data, what)
        return DatasetExamples(data, what, inputs_only=inputs_only, batched=True)
    collate, batch_size, drop_last = None, None, False
    if is_loader(data):
        data, batch_size, collate, drop_last = unwrapped(data, what)
    if collate is None and _has_tensors(data):
        tensors = ArrayExamples(tree_of(data.tensors[0], what)) if inputs_only else arrays_of(data.tensors, what)
        tensors.batch_size, tensors.drop_last = batch_size, drop_last
        return tensors
    if _is_listed(data) or _is_dataset(data):
        items = DatasetExamples(data, what, targets, collate=collate, inputs_only=inputs_only, batch_size=batch_size)
        items.drop_last = drop_last
        return items
    if hasattr(data, "__iter__") and not _is_array(data):
        raise BadData(
            f"{what}: {type(data).__name__} can only be iterated, and a step names its examples by index, so that it "
            "can be computed again: pass ps.cached(data, folder), which writes the examples once"
        )
    return None


def _is_dataset(data: Any) -> bool:
    """Tell whether an object has a length and items that are examples."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(data, torch_data.IterableDataset):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not _is_array(data)


def _is_array(data: Any) -> bool:
    """Tell whether an object is an array, a tensor, a table, a collection or text."""
    if isinstance(data, tuple | list | Mapping | str | bytes):
        return True
    return hasattr(data, "shape") and (hasattr(data, "dtype") or hasattr(data, "dtypes"))


def _has_tensors(dataset: Any) -> bool:
    """Tell whether a dataset is PyTorch's `TensorDataset` of two or three tensors."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    return torch_data is not None and type(dataset) is torch_data.TensorDataset and len(dataset.tensors) in (2, 3)


def _is_listed(data: Any) -> bool:
    """Tell whether an object is a list of examples, not of arrays."""
    return isinstance(data, list) and bool(data) and isinstance(data[0], tuple | Mapping)


def _check_py_dataset(base: Any, data: Any, what: str) -> None:
    name = type(data).__name__
    if getattr(data, "num_batches", 0) is None:
        raise BadData(f"{what}: {name} has no end: num_batches is None, and an epoch has each batch once")
    for hook in ("on_epoch_end", "on_epoch_begin"):
        if getattr(type(data), hook, None) is not getattr(base, hook, None):
            raise BadData(
                f"{what}: {name} has {hook}, and here an index is the same batch in every epoch, wherever it is "
                "computed: leave it out; the batches are shuffled in each epoch"
            )


def is_loader(data: Any) -> bool:
    """Tell whether an object is a PyTorch DataLoader."""
    loading = sys.modules.get("torch.utils.data")
    return loading is not None and isinstance(data, loading.DataLoader)


def unwrapped(loader: Any, what: str) -> tuple[Any, int, Collate | None, bool]:
    """Return a loader's dataset, batch size, collate_fn if it is not the default, and `drop_last`."""
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
    return loader.dataset, loader.batch_size, collate, bool(loader.drop_last)


# --- arguments ---


def one_data(call: str, data: Any, y: Any, apart: Sequence[object], others: dict[str, Any]) -> Any:
    """Return the data of a call, whose inputs and targets may be separate arguments as in Keras: call(x, y)."""
    if "x" in others:
        if data is not None:
            raise ConfigurationError(f"{call} was given its data twice: as the first argument and as x=")
        data = others.pop("x")
    if apart:
        raise ConfigurationError(f"{call} takes the data as {call}(x, y) or {call}((x, y)), and all else by name")
    if data is None:
        raise ConfigurationError(f"{call} needs data: {call}(x, y), {call}((x, y)) or a dataset")
    return data if y is None else (data, y)


def check_none(call: Callable[..., Any], others: Mapping[str, object], fit: Callable[..., Any] | None = None) -> None:
    """Refuse arguments that a call does not have; the error says so if `fit` has them."""
    for name in others:
        allowed = _parameters(call)
        hint = _ELSEWHERE.get(name, "fit has it" if fit is not None and name in _parameters(fit) else "")
        raise ConfigurationError(
            f"{call.__name__} has no {name}=; {f'{hint}; ' if hint else ''}allowed: {', '.join(allowed)}"
        )


def _parameters(call: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name not in ("self", "apart", "others")]
