"""Norms of gradients on a GPU, bit-identical to `global_norm`: sums of squares in NumPy's order.

NumPy's pairwise summation halves a run until a part has at most 128 numbers, adds these in eight columns, and adds the
parts in pairs. The GPU sums each part, and the host adds these sums. Knows no step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parashard.plan.flat import FlatLayout
from parashard.plan.variables import Float32s
from parashard.process.cuda_code import elementwise

Float64s = npt.NDArray[np.float64]
_PART_MAX = 128  # NumPy's PW_BLOCKSIZE
_COLUMNS = 8

SQUARES = f"""
const long long begin = begins[i], length = lengths[i];
double column[{_COLUMNS}] = {{0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0}}, sum = 0.0;
long long j = 0;
if (length >= {_COLUMNS}) {{
    for (; j + {_COLUMNS} <= length; j += {_COLUMNS}) {{
        for (int k = 0; k < {_COLUMNS}; ++k) {{
            double value = exact_double(run[begin + j + k]);
            column[k] += value * value;
        }}
    }}
    sum = ((column[0] + column[1]) + (column[2] + column[3])) + ((column[4] + column[5]) + (column[6] + column[7]));
}}
for (; j < length; ++j) {{
    double value = exact_double(run[begin + j]);
    sum += value * value;
}}
squares = sum;
"""


class Scaling(NamedTuple):
    """Scaling of a step's gradients on a GPU; it does not apply to state without a gradient."""

    weight: float = 1.0
    clip_norm: float | None = None
    """Bound of the norm of all gradients together, before `weight`."""
    variable_clip_norm: float | None = None
    """Bound of each variable's norm, applied first."""
    tells_norm: bool = False
    """Whether the norm of all gradients together, after `weight`, is returned; then only variables are clipped."""

    @property
    def clips(self) -> bool:
        """Whether anything may be clipped."""
        return self.clip_norm is not None or self.variable_clip_norm is not None


PLAIN = Scaling()


class Pairs:
    """NumPy's pairwise summation of `numbers` values: the lengths of the parts, and the tree of their additions."""

    def __init__(self, numbers: int) -> None:
        lengths, self._levels = np.array([numbers]), []
        while (halved := lengths > _PART_MAX).any():
            half = lengths // 2
            half -= half % _COLUMNS
            first = np.cumsum(1 + halved) - 1 - halved  # new index of each part, or of its first half
            parts = np.repeat(lengths, 1 + halved)
            parts[first[halved]] = half[halved]
            parts[first[halved] + 1] -= half[halved]
            self._levels.append((first, halved))
            lengths = parts
        self.lengths = lengths

    def total(self, sums: Float64s) -> float:
        """Return the sum of all values, from the sums of the parts."""
        for first, halved in reversed(self._levels):
            whole = sums[first]
            whole[halved] += sums[first[halved] + 1]
            sums = whole
        return float(sums[0])


class Norms:
    """Sums of squares of some variables of a run on a GPU."""

    def __init__(self, cupy: Any, layout: FlatLayout, names: list[str], host_memory: Callable[[int], Float32s]) -> None:
        self._pairs = {
            name: Pairs(layout.places[name][0].stop - layout.places[name][0].start) for name in sorted(names)
        }
        nothing = np.zeros(0, np.int64)
        lengths = np.concatenate([nothing, *(pairs.lengths for pairs in self._pairs.values())])
        begins = np.concatenate(
            [
                nothing,
                *(
                    layout.places[name][0].start + np.cumsum(pairs.lengths) - pairs.lengths
                    for name, pairs in self._pairs.items()
                ),
            ]
        )
        self._begins, self._lengths = cupy.asarray(begins), cupy.asarray(lengths)
        self._squares = cupy.empty(len(lengths), np.float64)
        self._on_host: Float64s = host_memory(2 * len(lengths)).view(np.float64)
        self._kernel = elementwise(
            cupy, "squares", "raw float32 run, raw int64 begins, raw int64 lengths", "float64 squares", SQUARES
        )

    def ask(self, run: Any, stream: Any) -> None:
        """Start to compute the sums of squares of a run, and their copy to the host."""
        self._kernel(run, self._begins, self._lengths, self._squares)
        self._squares.get(stream=stream, out=self._on_host, blocking=False)

    def squares(self) -> Mapping[str, float]:
        """Return the squared norm of each variable, ordered by name; the caller must have waited for the stream."""
        found, begin = {}, 0
        for name, pairs in self._pairs.items():
            stop = begin + len(pairs.lengths)
            found[name] = pairs.total(self._on_host[begin:stop])
            begin = stop
        return found
