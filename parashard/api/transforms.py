"""Transforms of training examples: a user's function, and a generator that is the same wherever a step is computed.

Owns how the function is called and what it may return, and what of the process's own generators a user's code sees.
Called by `parashard.api.source`, and around what a dataset or a fit computes.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from parashard.api.arrays import handed_out, numbers_of, tree_of
from parashard.data.base import BadExample, Examples, Indices
from parashard.data.tree import Tree, leaves, map_leaves, rows_of
from parashard.errors import BadData
from parashard.models.user_errors import named_with_line

Transform = Callable[[Examples, int, int, Indices], Examples]
"""Makes of a step's examples others, with the job's seed, the step and the indices."""


def transform_of(function: Any, batched: bool) -> Transform | None:
    """Return the transform that a user's function is; None: there is none.

    Raises BadData if it does not take these.

    Parameters
    ----------
    function : callable or None
        `function(example, rng)` returns (inputs, targets) of one example; `function(batch, rng)`, told by that name, of
        a whole batch. `rng` is a `numpy.random.Generator` of the seed and the step, and of the example's index.
    batched : bool
        An index of the data is a batch.
    """
    if function is None:
        return None
    names = _parameters(function)
    if len(names) != 2:
        raise BadData(f"transform is a function of (example, rng) or (batch, rng), found one of ({', '.join(names)})")
    if names[0] == "batch":
        return lambda examples, seed, step, indices: _of_batch(function, examples, seed, step)
    if batched:
        raise BadData("transform: an index of these data is a batch, so its first parameter is named batch")
    return lambda examples, seed, step, indices: _of_each(function, examples, seed, step, indices)


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _of_each(function: Any, examples: Examples, seed: int, step: int, indices: Indices) -> Examples:
    made = []
    for row, index in enumerate(indices.tolist()):
        where = f"transform of example {index}"
        example = map_leaves(lambda array, row=row: array[row], examples[:2])
        made.append(_pair(function, example, np.random.default_rng((seed, step, index)), where))
        first, this = ([(name, array.shape) for name, array in leaves(one)] for one in (made[0], made[-1]))
        if first != this:
            raise BadExample(
                f"{where}: returned the shapes {[shape for _, shape in this]}, and {[shape for _, shape in first]} of "
                f"example {indices[0]}: those of a step are the same"
            )
    stacked = map_leaves(lambda *arrays: handed_out(np.stack(arrays)), *made)
    return (*stacked, *examples[2:])


def _of_batch(function: Any, examples: Examples, seed: int, step: int) -> Examples:
    where = f"transform of step {step}"
    made = map_leaves(handed_out, _pair(function, examples[:2], np.random.default_rng((seed, step)), where))
    rows = rows_of(examples[0])
    if any(array.shape[:1] != (rows,) for _, array in leaves(made)):
        raise BadExample(f"{where}: arrays have one row for each of {rows} examples")
    return (*made, *examples[2:])


def _pair(function: Any, given: Tree, rng: np.random.Generator, where: str) -> tuple[Tree, Tree]:
    try:
        made = function(given, rng)
    except Exception as error:
        raise BadExample(f"{where}: {named_with_line(error)}") from error
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise BadExample(f"{where}: returned {type(made).__name__}; due is (inputs, targets)")
    try:
        return tree_of(made[0], f"{where}: inputs", numbers_of), tree_of(made[1], f"{where}: targets", numbers_of)
    except BadData as error:
        raise BadExample(error.message) from error


@contextmanager
def kept_generators(*, gpus: bool = True) -> Iterator[None]:
    """Leave Python's, NumPy's and PyTorch's generators as they were: the user's own draws go on as if there was none.

    PyTorch's are kept where it is imported already; those of GPUs, if they are asked for, where one is in use.
    """
    torch: Any = sys.modules.get("torch")
    pythons, numpys = random.getstate(), np.random.get_state()
    torchs = None if torch is None else torch.get_rng_state()
    in_use = gpus and torch is not None and torch.cuda.is_initialized()
    of_gpus = torch.cuda.get_rng_state_all() if in_use else None
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        if torchs is not None:
            torch.set_rng_state(torchs)
        if of_gpus is not None:
            torch.cuda.set_rng_state_all(of_gpus)


@contextmanager
def generators_seeded(seed: int) -> Iterator[None]:
    """Set the process's generators for a while: of Python, of NumPy, and of PyTorch where it is imported."""
    torch: Any = sys.modules.get("torch")
    with kept_generators(gpus=False):  # a step's items are computed on the host
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if torch is not None:
            torch.default_generator.manual_seed(seed)
        yield
