"""Dropout whose masks are the same wherever a step is computed.

Knows no other layer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from parashard.data.base import Array
from parashard.errors import ConfigurationError
from parashard.job.model_options import DROPOUT_RATE_MAX
from parashard.layers.base import Layer, Pass, Pullback
from parashard.plan.splitmix import splitmix64

_LANES = 4  # 16-bit uniforms cut from one 64-bit hash
_LANE_VALUES = 1 << 16


@dataclass(frozen=True)
class Dropout(Layer):
    """Inverted dropout (Srivastava et al., JMLR 2014, section 10): each number is 0, or divided by P(kept).

    The mask is a function of the seed, the step and the layer's number among the dropout layers alone. An evaluation
    drops nothing.

    Parameters
    ----------
    rate : float
        Probability of dropping a number, in [0, 0.99]; 2^-16 is its resolution.
    """

    name: ClassVar[str] = "dropout"

    rate: float

    def __post_init__(self) -> None:
        if not isinstance(self.rate, int | float) or not 0 <= self.rate <= DROPOUT_RATE_MAX:
            raise ConfigurationError(f"Dropout: rate is between 0 and {DROPOUT_RATE_MAX}, found {self.rate!r}")

    def apply(self, weights: Mapping[str, Array], x: Array, at: Pass) -> tuple[Array, Pullback]:
        if at.key is None or not self.rate:
            return x, lambda gradient, to_input: (gradient, {})
        mask = dropout_mask(x.shape, self.rate, at.key, x.dtype, at.xp)
        return x * mask, lambda gradient, to_input: (at.xp.multiply(gradient, mask, out=gradient), {})


def dropout_mask(shape: tuple[int, ...], rate: float, key: tuple[int, int, int], dtype: Any, xp: Any) -> Array:
    """Return the factors of inverted dropout (Srivastava et al., JMLR 2014, section 10): 0 or 1 / P(kept).

    Element e (row-major) is dropped where 16-bit lane e mod 4 of the e // 4-th hash lies below round(rate * 2^16).
    The hash is a counter-based SplitMix64 under the key, in 64-bit integers: the same mask on NumPy and on CuPy, and
    on every worker. The factor uses the rounded rate, so the expectation of the mask is exactly 1.

    Parameters
    ----------
    shape : tuple of int
        Shape of the activations.
    rate : float
        Probability of dropping an element, in [0, 0.99]; 2^-16 is its resolution.
    key : (seed, step, layer)
        Identifies the mask.
    dtype : dtype
        float32 or float64.
    """
    elements = math.prod(shape)
    threshold = round(rate * _LANE_VALUES)
    hashes = splitmix64(xp.arange(-(-elements // _LANES), dtype=xp.uint64), _dropout_key(*key))
    lanes = hashes.view(xp.uint16)
    mask = (lanes[:elements] >= threshold).astype(dtype)
    mask *= _LANE_VALUES / (_LANE_VALUES - threshold)
    return mask.reshape(shape)


def _dropout_key(seed: int, step: int, layer: int) -> int:
    text = f"parashard dropout\0{seed}\0{step}\0{layer}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
