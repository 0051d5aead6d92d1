"""Encoding of gradients on a GPU, bit-identical to `compiled`, so that only the bytes to send are copied to the host.

A variable in bfloat16 or float16 is copied as its codes, one in int8 or top-k as its partitions' payloads
(`gpu_feedback`). All others are copied in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.encodings.encoding import Encoding
from parashard.encodings.feedback import EncodedParts
from parashard.encodings.gpu_blocks import EncodedPiece
from parashard.encodings.gpu_feedback import FeedbackOnGpu, HeldResidues
from parashard.plan.flat import ALIGNMENT_BYTES, FlatLayout
from parashard.plan.partition import Partition, Plan
from parashard.plan.variables import Variable
from parashard.process.cuda_code import elementwise
from parashard.protocol.messages import DType

Words = npt.NDArray[np.uint16]
_CHUNK = ALIGNMENT_BYTES // 4  # elements of a chunk of a run, all of one variable
_FLOAT32, _BFLOAT16, _FLOAT16 = 1, 2, 3  # how a chunk is copied; 0: not at all
_HOW = {"bfloat16": _BFLOAT16, "float16": _FLOAT16}

TO_CODES = """
__device__ unsigned to_bfloat16(unsigned bits) {
    unsigned magnitude = bits & 0x7FFFFFFFu;
    unsigned rounded = (magnitude + 0x7FFFu + ((magnitude >> 16) & 1u)) >> 16;
    return (rounded < 0x7F7Fu ? rounded : 0x7F7Fu) | ((bits >> 16) & 0x8000u);
}
__device__ unsigned to_float16(unsigned bits) {
    unsigned magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x477FE000u) magnitude = 0x477FE000u;
    unsigned code;
    if (magnitude >= 0x38800000u) {
        code = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    } else {
        code = bits_of(exact_sum(float_of(magnitude), 0.5f)) - 0x3F000000u;
    }
    return code | ((bits >> 16) & 0x8000u);
}
"""
"""`compiled.to_bfloat16` and `compiled.to_float16`, of one number."""

WRITE = f"""
long long chunk = i / {_CHUNK}, at = begins[chunk], within = i % {_CHUNK};
unsigned bits = bits_of(value);
if (how[chunk] == {_FLOAT32}) {{
    words[at + 2 * within] = bits & 0xFFFFu;
    words[at + 2 * within + 1] = bits >> 16;
}} else if (how[chunk] == {_BFLOAT16}) {{
    words[at + within] = to_bfloat16(bits);
}} else if (how[chunk] == {_FLOAT16}) {{
    words[at + within] = to_float16(bits);
}}
"""


def leaves_shorter(variables: Iterable[Variable]) -> bool:
    """Tell whether any gradient may be copied from a GPU in fewer bytes than it has there."""
    return any(variable.encoding != "float32" and not variable.frozen for variable in variables)


class TransferLayout:
    """Layout of the gradients that are copied from a GPU, in words of 16 bits; frozen variables are not copied.

    A variable in int8 or top-k is encoded if that makes all of its partitions shorter.

    Parameters
    ----------
    cupy : module
    layout : FlatLayout
    variables : mapping of str to Variable
    plan : Plan, optional
        Its partitions are encoded in int8 or top-k; None: such variables are copied in float32.
    use : callable
        Returns a context in which the device, and the stream of all that is launched here, are current.

    Attributes
    ----------
    words : int
        Length of the copy.
    """

    def __init__(
        self,
        cupy: Any,
        layout: FlatLayout,
        variables: Mapping[str, Variable],
        plan: Plan | None = None,
        use: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._use = use
        chunks = -(-layout.elements // _CHUNK)
        how, begins, self.words = np.zeros(chunks, np.uint8), np.zeros(chunks, np.int64), 0
        self._places: dict[str, tuple[slice, bool, tuple[int, ...]]] = {}  # words, whether they are codes, shape
        self._parts: dict[str, dict[Partition, slice]] = {}  # bytes of each payload in int8 or top-k
        self._shapes = {name: shape for name, (_, shape) in layout.places.items()}
        pieces: dict[str, list[EncodedPiece]] = {}
        for name, (place, shape) in layout.places.items():
            if variables[name].frozen:
                continue
            encoded = _encoded_pieces(variables[name], plan, place.start, 2 * self.words)
            if encoded:
                pieces[name] = encoded
                self._parts[name] = {
                    p.slice.partition: slice(p.begin_bytes, p.begin_bytes + p.slice.size_bytes) for p in encoded
                }
                self.words = -(-max(of.stop for of in self._parts[name].values()) // 2 // _CHUNK) * _CHUNK
                continue
            of_variable = slice(place.start // _CHUNK, -(-place.stop // _CHUNK))
            each = 1 if variables[name].encoding in _HOW else 2
            how[of_variable] = _HOW.get(variables[name].encoding, _FLOAT32)
            count = of_variable.stop - of_variable.start
            begins[of_variable] = self.words + each * _CHUNK * np.arange(count)
            stop = self.words + each * (place.stop - place.start)
            self._places[name] = slice(self.words, stop), each == 1, shape
            self.words += each * _CHUNK * count
        self._how, self._begins = cupy.asarray(how), cupy.asarray(begins)
        self._feedback = FeedbackOnGpu(cupy, pieces, use) if pieces else None
        self._write = elementwise(
            cupy, "leaving", "raw uint8 how, raw int64 begins, float32 value", "raw uint16 words", WRITE,
            preamble=TO_CODES,
        )  # fmt: skip

    def new_residues(self) -> HeldResidues | None:
        """Return memory for the residues of a push; None: no variable here has residues."""
        return None if self._feedback is None else self._feedback.new()

    def write(self, run: Any, words: Any, names: Collection[str], taken: HeldResidues | None) -> None:
        """Encode a run of gradients: those of `names`; for other variables the result is meaningless."""
        with self._use():
            self._write(self._how, self._begins, run, words)
        if taken is not None and self._feedback is not None:
            self._feedback.encode(run, words, names, taken)

    def settle_when_dropped(self, push: object, taken: HeldResidues | None) -> None:
        """Return a push's residues once it is dropped, for the shards without an answer."""
        if taken is not None and self._feedback is not None:
            self._feedback.settle_when_dropped(push, taken)

    def over(self, words: Words, taken: HeldResidues | None) -> dict[str, npt.NDArray[Any] | EncodedParts]:
        """Return the variables as views of the copied words: float32, codes in uint16, or encoded parts."""
        found: dict[str, npt.NDArray[Any] | EncodedParts] = {
            name: (words[place] if codes else words[place].view(np.float32)).reshape(shape)
            for name, (place, codes, shape) in self._places.items()
        }
        if taken is not None and self._feedback is not None:
            settle, content = partial(self._feedback.settle, taken), words.view(np.uint8)
            for name, parts in self._parts.items():
                payloads = {partition: content[place].data for partition, place in parts.items()}
                found[name] = EncodedParts(self._shapes[name], payloads, settle)
        return found


def _encoded_pieces(variable: Variable, plan: Plan | None, begin: int, begin_bytes: int) -> list[EncodedPiece]:
    """Return the partitions of a variable in int8 or top-k, unless that makes not all of them shorter.

    The variable begins at `begin` in the run of gradients, and at `begin_bytes` among the bytes to send.
    """
    encoding, pieces = Encoding.parse(variable.encoding), []
    if plan is None or not encoding.has_residue:
        return []
    for shard, layout in enumerate(plan.layouts):
        for partition in (placed.partition for placed in layout if placed.partition.variable == variable.name):
            made = encoding.slice_of(partition, variable.row_elements)
            if made.dtype is DType.FLOAT32:
                return []
            pieces.append(EncodedPiece(shard, made, begin + partition.row_start * made.row_elements, begin_bytes))
            begin_bytes += -(-made.size_bytes // 4) * 4  # scales, indices and values have four bytes each
    return pieces
