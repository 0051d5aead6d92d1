"""Error feedback: what an encoding leaves out of one push joins the next.

Owns the residues of a worker's variables and who may have them: a push that is under way takes the residue with it, and
its receipt decides what comes back (P17). Knows nothing of bytes or sockets. Called by `parashard.client.shard_client`,
from every thread that pushes.

With c = gradient + residue, a push sends Q(c). If the shard has applied it, c - Q(c) is left to be sent; if not, the
residue is what it was, and the gradient is its step's business, which somebody computes again. So at any time

    sum of what the shard applied + residue = sum of the gradients whose pushes it applied,

however many pushes were under way at once. A worker's residues die with it, and so does what is left of a push whose
receipt was lost: the promise is per push, not per unit of gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from parashard.encodings import codec
from parashard.encodings.encoding import Encoding
from parashard.plan.partition import Partition, Placed, Plan
from parashard.plan.variables import Float32s
from parashard.protocol.messages import Slice

_Key = tuple[int, Partition]


@dataclass
class _Room:
    """Memory of one encoded slice; fresh pages cost more than what is written to them, so it is used again."""

    payload: npt.NDArray[np.uint8]
    left: Float32s | None = None  # what the encoding left out; None: it leaves nothing, or its memory is in use


@dataclass(eq=False)
class Encoded:
    """One slice of a push, encoded.

    Attributes
    ----------
    slice : Slice
        What the payload holds.
    payload : memoryview
        Its bytes; valid until `GradientEncoder.settle`.
    """

    slice: Slice
    payload: memoryview
    _key: _Key = field(repr=False)
    _room: _Room = field(repr=False)
    _residue: Float32s | None = field(repr=False)  # what was taken, to be given back if the push is not applied
    _settled: bool = field(default=False, repr=False)


class GradientEncoder:
    """Encodes one worker's gradients as the plan's variables say, and keeps their residues. Any thread may call it.

    Parameters
    ----------
    plan : Plan
        Names the variables' encodings.
    """

    def __init__(self, plan: Plan) -> None:
        self._encodings = {name: Encoding.parse(variable.encoding) for name, variable in plan.variables.items()}
        self._row_elements = {name: variable.row_elements for name, variable in plan.variables.items()}
        self._lock = threading.Lock()
        self._residues: dict[_Key, Float32s] = {}  # a key is absent: zero, or with a push that is under way
        self._spare: dict[_Key, list[_Room]] = {}  # never more than were in use at once

    def encode(self, shard: int, placed: Placed, rows: Float32s) -> Encoded:
        """Encode the gradient of a partition, together with what earlier pushes have left of it.

        Parameters
        ----------
        shard : int
            Where the partition is.
        placed : Placed
            The partition.
        rows : ndarray of float32, shape (rows, ...)
            Finite; only read, and not kept.

        Returns
        -------
        Encoded
            To be settled, whatever becomes of the push.
        """
        name = placed.partition.variable
        encoding, key = self._encodings[name], (shard, placed.partition)
        piece = encoding.slice_of(placed.partition, self._row_elements[name])
        has_residue = encoding.has_residue and piece.dtype is encoding.dtype
        values = np.ascontiguousarray(rows, np.float32).reshape(-1)
        with self._lock:
            rooms = self._spare.get(key)
            room = rooms.pop() if rooms else None
            residue = self._residues.pop(key, None) if has_residue else None
        if room is None:
            room = _Room(np.empty(piece.size_bytes, np.uint8))
        if has_residue:
            if room.left is None:
                room.left = np.empty(piece.elements, np.float32)
            nothing = np.zeros(piece.elements, np.float32) if residue is None else residue
            codec.encode(piece, values, room.payload, nothing, room.left)
        else:
            codec.encode(piece, values, room.payload)
        return Encoded(piece, room.payload.data, key, room, residue)

    def settle(self, encodeds: Iterable[Encoded], applied: bool) -> None:
        """Say what became of pushes; what is settled already stays as it is.

        Parameters
        ----------
        encodeds : iterable of Encoded
            Their payloads are not to be read any more.
        applied : bool
            Whether this very push moved the weights (P17): its receipt says so, or says duplicate after a receipt of
            the same push was lost. False for any other duplicate, for a refusal and for no receipt at all.
        """
        with self._lock:
            for encoded in encodeds:
                if not encoded._settled:
                    encoded._settled = True
                    self._settle(encoded, applied)

    def _settle(self, encoded: Encoded, applied: bool) -> None:
        room, residue = encoded._room, encoded._residue
        back = room.left if applied else residue
        if back is not None:
            present = self._residues.setdefault(encoded._key, back)
            if present is not back:  # another push was under way at the same time
                np.add(present, back, out=present)
        if applied:  # only then has everybody who reads the payload surely done so
            room.left = residue  # whose values have been sent; those of `left` are kept now, or added to what is kept
            self._spare.setdefault(encoded._key, []).append(room)
