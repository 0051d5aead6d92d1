"""Tensors of PyTorch: conversions from pulled arrays, and of values and gradients to arrays; seeds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.plan.embedding import BFLOAT16
from parashard.process.extras import install

try:
    import torch
except ImportError:
    raise ConfigurationError(f"ps.torch needs PyTorch: {install('torch')}") from None

__all__ = ["torch"]  # other modules import it from here

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor_of(array: Any) -> torch.Tensor:
    """Return a tensor that shares an array's memory, or that of a copy if the array may not be written."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    return torch.as_tensor(array)  # CuPy's, by __cuda_array_interface__


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a NumPy array of a tensor's values, floating ones as float32."""
    values = tensor.detach().cpu()
    return np.array((values.float() if values.is_floating_point() else values).numpy())


def on_host(value: Any) -> Any:
    """Return a tensor as a NumPy array of its type, or of float32 where it is of half precision."""
    if not isinstance(value, torch.Tensor):
        return value
    values = value.detach().cpu()
    return (values.float() if values.dtype in AUTOCAST.values() else values).numpy()


def output_of(value: Any) -> np.ndarray[Any, Any]:
    """Return an output of a module as a NumPy array of its type, bfloat16 as float32; ConfigurationError: no tensor."""
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(f"predict needs a module that returns tensors, found {type(value).__name__}")
    values = value.detach().cpu()
    return np.array((values.float() if values.dtype == torch.bfloat16 else values).numpy())


def stored(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's values in the form of files: in its type, bfloat16 as `parashard.plan.embedding.BFLOAT16`."""
    values = tensor.detach().cpu().contiguous()
    if values.dtype == torch.bfloat16:
        return np.array(values.view(torch.int16).numpy()).view(BFLOAT16)
    return np.array(values.numpy())


def gradient_of(gradient: torch.Tensor, xp: Any, scale: float = 1.0) -> Array:
    """Return a gradient, divided by a scale, as an array of `xp` of float32."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    gradient = gradient.detach().float()
    gradient = gradient if scale == 1 else gradient / scale
    return gradient.numpy() if xp is np else xp.from_dlpack(gradient)


def seed_generators(seed: int) -> None:
    """Seed the default generators that a step can draw from: PyTorch's, Python's and NumPy's.

    `torch.manual_seed` also notes the seed, with a traceback, for devices that are not in use: a millisecond each time.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
