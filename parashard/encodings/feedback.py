"""Error feedback: the encoding error of one push is added to the next.

Owns the residues of a worker's variables. A push in flight holds the residue, and its ack decides the residue that is
returned. Knows nothing of bytes or sockets.

With c = gradient + residue, a push sends Q(c). If the shard has applied it, the residue becomes c - Q(c); if not, it
stays as it was, and the gradient is lost with its push: its step is computed again. So at any time

    sum of what the shard applied + residue = sum of the gradients whose pushes it applied,

for any number of concurrent pushes. A worker's residues are lost with its process, and so is the residue of a push
whose ack was lost: exactly-once holds per push, not per unit of gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parashard.encodings import codec
from parashard.encodings.encoding import Encoding
from parashard.plan.partition import Partition, Placed, Plan
from parashard.plan.variables import Float32s
from parashard.protocol.messages import DType, Slice

_Key = tuple[int, Partition]


@dataclass
class _Buffers:
    """Reusable memory of one encoded slice; faulting in fresh pages costs more than writing to them."""

    payload: npt.NDArray[np.uint8]
    left: Float32s | None = None  # the encoding error; None: there is none, or its memory is in use


@dataclass(eq=False)
class Encoded:
    """One slice of a push, encoded; the payload is valid until `GradientEncoder.settle`."""

    slice: Slice
    payload: memoryview
    _key: _Key = field(repr=False)
    _buffers: _Buffers = field(repr=False)
    _residue: Float32s | None = field(repr=False)  # restored if the push is not applied
    _settled: bool = field(default=False, repr=False)


class EncodedParts(NamedTuple):
    """A variable's gradient, encoded by a GPU, which keeps its residue."""

    shape: tuple[int, ...]
    payloads: Mapping[Partition, memoryview]
    settle: Callable[[int, bool], None]
    """Records the outcome of the push to a shard, of all variables that were encoded with this one."""


class OutcomeCallback(NamedTuple):
    """Receiver of the outcome of a push to a shard, for a gradient that was not encoded here."""

    settle: Callable[[int, bool], None]
    shard: int


class GradientEncoder:
    """Encodes one worker's gradients as the plan's variables say, and keeps their residues. Any thread may call it."""

    def __init__(self, plan: Plan) -> None:
        self._encodings = {name: Encoding.parse(variable.encoding) for name, variable in plan.variables.items()}
        self._row_elements = {name: variable.row_elements for name, variable in plan.variables.items()}
        self._lock = threading.Lock()
        self._residues: dict[_Key, Float32s] = {}  # absent: zero, or held by a push in flight
        self._spare: dict[_Key, list[_Buffers]] = {}  # at most as many as were in use at once

    def encode(self, shard: int, placed: Placed, rows: Float32s) -> Encoded:
        """Encode the gradient of a partition plus its residue: finite float32 rows, only read, and not kept."""
        # The result is to be settled whether or not the push succeeds.
        encoding, key = self._encodings[placed.partition.variable], (shard, placed.partition)
        piece = self.slice_of(placed)
        has_residue = encoding.has_residue and piece.dtype is encoding.dtype
        values = np.ascontiguousarray(rows, np.float32).reshape(-1)
        with self._lock:
            spare = self._spare.get(key)
            buffers = spare.pop() if spare else None
            residue = self._residues.pop(key, None) if has_residue else None
        if buffers is None:
            buffers = _Buffers(np.empty(piece.size_bytes, np.uint8))
        if has_residue:
            if buffers.left is None:
                buffers.left = np.empty(piece.elements, np.float32)
            nothing = np.zeros(piece.elements, np.float32) if residue is None else residue
            codec.encode(piece, values, buffers.payload, nothing, buffers.left)
        else:
            codec.encode(piece, values, buffers.payload)
        return Encoded(piece, buffers.payload.data, key, buffers, residue)

    def slice_of(self, placed: Placed) -> Slice:
        """Return the slice that carries a gradient of a partition."""
        name = placed.partition.variable
        return self._encodings[name].slice_of(placed.partition, self._row_elements[name])

    def takes_codes(self, variable: str) -> bool:
        """Tell whether a GPU may have encoded a variable's gradients already."""
        return self._encodings[variable].dtype in (DType.BFLOAT16, DType.FLOAT16)

    def settle(self, encodeds: Iterable[Encoded | OutcomeCallback], applied: bool) -> None:
        """Record the outcome of pushes, whose payloads are not read any more; later outcomes of a slice are ignored."""
        # `applied`: this very push was taken: its ack says so, or says duplicate after an ack of the same push was
        # lost. False for any other duplicate, for a refusal and for no ack at all.
        with self._lock:
            for encoded in encodeds:
                if isinstance(encoded, OutcomeCallback):
                    encoded.settle(encoded.shard, applied)
                elif not encoded._settled:
                    encoded._settled = True
                    self._settle(encoded, applied)

    def _settle(self, encoded: Encoded, applied: bool) -> None:
        buffers, residue = encoded._buffers, encoded._residue
        back = buffers.left if applied else residue
        if back is not None:
            present = self._residues.setdefault(encoded._key, back)
            if present is not back:  # another push was in flight at the same time
                np.add(present, back, out=present)
        if applied:  # only then no transport reads the payload any more
            buffers.left = residue  # its values have been sent; those of `left` are in `_residues` now
            self._spare.setdefault(encoded._key, []).append(buffers)
