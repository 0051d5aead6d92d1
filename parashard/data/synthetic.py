"""Synthetic examples, generated on demand: one Gaussian cluster per class, any number of examples.

Owns the generator: example i is a function of (seed, i) alone, in integer mixing, additions and one rounding, so it is
the same on every machine, and no memory grows with the number of examples. Serves benchmarks, tests and the ledger
oracle, which needs only the number of examples.
"""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from parashard.data.arrays import ArraySource, Split
from parashard.data.base import DataSpec, Indices
from parashard.data.options import DigitsOptions, SyntheticOptions
from parashard.errors import ConfigurationError
from parashard.plan.seeding import splitmix64
from parashard.process.extras import install

_Words = npt.NDArray[np.uint64]
_U64 = np.uint64
_SQUARE_ROOT_OF_3 = 1.7320508075688772


class SyntheticSource:
    """A `DataSource` of Gaussian clusters: input = centre of the class + noise * normal; classes are equally likely.

    The normal numbers are sums of four 16-bit uniforms (Irwin-Hall), because no transcendental function has the same
    bits everywhere. Held-out example j is example `examples + j` of the same stream.
    """

    def __init__(self, options: SyntheticOptions) -> None:
        self._options = options
        self._label_key, self._noise_key, centre_key = (
            np.frombuffer(hashlib.sha256(f"parashard synthetic\0{options.seed}".encode()).digest()[:24], "<u8")
            .astype(_U64)
            .tolist()
        )
        elements = np.arange(options.classes * options.features, dtype=_U64)
        self._centres = normal_numbers(elements, centre_key).reshape(options.classes, options.features)
        self._features = np.arange(options.features, dtype=_U64)
        text = json.dumps(options.plain(), separators=(",", ":"))
        self.spec = DataSpec(
            examples=options.examples,
            held_out=options.held_out,
            input_shape=(options.features,),
            classes=options.classes,
            fingerprint=hashlib.sha256(f"synthetic 1\0{text}".encode()).hexdigest(),
        )

    def examples(self, indices: Indices) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Return (inputs, targets) of the training examples with these indices, as new arrays."""
        return self._generated(np.asarray(indices, np.int64).view(_U64))

    def held_out(self, start: int, stop: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Return (inputs, targets) of the held-out examples [start, stop), as new arrays."""
        first = self._options.examples
        return self._generated(np.arange(first + start, first + min(stop, self._options.held_out), dtype=_U64))

    def _generated(self, numbers: _Words) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        labels = (splitmix64(numbers.copy(), self._label_key) % _U64(self._options.classes)).astype(np.int64)
        elements = numbers[:, None] * _U64(self._options.features) + self._features
        inputs = self._centres[labels] + self._options.noise * normal_numbers(elements, self._noise_key)
        return inputs.astype(np.float32), labels


def normal_numbers(counters: _Words, key: int) -> npt.NDArray[np.float64]:
    """Return one number per counter, which it overwrites: mean 0, variance 1, within 3.47 (four uniforms, rescaled)."""
    bits = splitmix64(counters, key)
    total = np.zeros(bits.shape)
    for shift in (0, 16, 32, 48):
        total += ((bits >> _U64(shift)) & _U64(0xFFFF)).astype(np.float64)
    return ((total + 2.0) * 2.0**-16 - 2.0) * _SQUARE_ROOT_OF_3  # lanes are centred; their sum's variance is 1/3


_BRIGHTEST = 16.0
_FILE = Path("datasets", "data", "digits.csv.gz")  # in scikit-learn's package: 64 pixels and the label in each row


def open_digits(options: DigitsOptions) -> ArraySource:
    """Load the digits that scikit-learn bundles (Alpaydin and Kaynak, UCI, 1998), if that is installed."""
    rows = _rows()
    digits = Split(rows[:, :-1], rows[:, -1].astype(np.int64))
    training, held_out = options.rows(len(rows))
    return ArraySource(digits.take(training), digits.take(held_out), classes=10, input_scale=_BRIGHTEST)


def _rows() -> np.ndarray:
    """Return pixels and labels as uint8 of shape (1797, 65)."""
    # They are read without importing scikit-learn, which would cost each process more than a second.
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations or []) if package else []:
        if (file := Path(folder) / _FILE).is_file():
            return np.loadtxt(file, np.uint8, delimiter=",")
    raise ConfigurationError(
        f"the digits data comes with scikit-learn, whose file is not found here; run: {install('examples')}"
    )
