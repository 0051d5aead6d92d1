"""Encoding: the wire encoding of a variable's gradients, parsed from its one-line form in the job file.

Owns the text form, and the type and length of an encoded partition. Knows no arithmetic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from parashard.errors import ConfigurationError
from parashard.plan.partition import Partition
from parashard.protocol.messages import DType, Slice

Kind = Literal["float32", "bfloat16", "float16", "int8", "topk"]

ALLOWED = "float32, bfloat16, float16, int8, or topk:FRACTION with 0 < FRACTION < 0.5"

_DTYPES: dict[Kind, DType] = {
    "float32": DType.FLOAT32,
    "bfloat16": DType.BFLOAT16,
    "float16": DType.FLOAT16,
    "int8": DType.INT8,
    "topk": DType.TOPK,
}
Codes16 = npt.NDArray[np.uint16]
Codes8 = npt.NDArray[np.int8]
Indices = npt.NDArray[np.uint32]

INT8_SCALE_LARGEST = np.float32(np.finfo(np.float32).max / 128)  # exact; no code times it overflows float32

_FRACTION = re.compile(r"0\.[0-9]{1,9}")
_TOPK_ELEMENTS_MAX = 1 << 32  # its indices are uint32


@dataclass(frozen=True)
class Encoding:
    """A wire encoding of gradients.

    Examples
    --------
    >>> Encoding.parse("topk:0.01")
    Encoding(kind='topk', fraction=0.01)
    >>> str(Encoding("int8"))
    'int8'
    """

    kind: Kind = "float32"  # `protos/tensor.proto` has the layouts
    # `topk`: the fraction of a partition's elements that is sent, the largest by magnitude; else 0. From 0.5 on, an
    # index and a value for each would be no shorter than all the values.
    fraction: float = 0.0

    def __post_init__(self) -> None:
        fits = 0 < self.fraction < 0.5 if self.kind == "topk" else self.fraction == 0
        if self.kind not in _DTYPES or not fits:
            raise ConfigurationError(f"encoding {self.kind!r} with fraction {self.fraction!r}; allowed: {ALLOWED}")

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """Return the encoding that a text names, or raise ConfigurationError; `Encoding.parse(str(e)) == e`."""
        for kind in _DTYPES:
            if text == kind and kind != "topk":
                return cls(kind)
        name, _, fraction = text.partition(":")
        if name != "topk" or not _FRACTION.fullmatch(fraction):
            raise ConfigurationError(f"encoding {text!r}; allowed: {ALLOWED}")
        return cls("topk", float(fraction))

    def __str__(self) -> str:
        if self.kind != "topk":
            return self.kind
        return f"topk:{f'{self.fraction:.9f}'.rstrip('0')}"

    @property
    def dtype(self) -> DType:
        """The dtype of slices in this encoding; see `slice_of` for the exception."""
        return _DTYPES[self.kind]

    @property
    def has_residue(self) -> bool:
        """Whether the encoding error is added to a later push (error feedback)."""
        return self.kind in ("int8", "topk")

    def slice_of(self, partition: Partition, row_elements: int) -> Slice:
        """Return the slice that carries a gradient of these rows."""
        # It is float32 where the encoding would not make it shorter (a bias of one element), or cannot number its
        # elements (`topk` beyond 2^32): so no push is longer than its gradient.
        plain = Slice(partition, row_elements)
        kept = 0
        if self.kind == "topk":
            if plain.elements > _TOPK_ELEMENTS_MAX:
                return plain
            # In decimal: in floats, 0.07 x 100 is a little more than 7.
            digits = str(self).partition(".")[2]
            kept = -(-int(digits) * plain.elements // 10 ** len(digits))
        encoded = Slice(partition, row_elements, self.dtype, kept)
        return encoded if encoded.size_bytes < plain.size_bytes else plain
