"""Generated examples: Gaussian clusters, a click log, and the digits that scikit-learn bundles.

Example i is a function of (seed, i) alone, computed by integer mixing and IEEE 754 arithmetic: it is the same on every
machine, and memory does not grow with the number of examples. The ids of the click log have skewed frequencies as in
real logs, are replaced over time, and determine the logit that the label is drawn from, so the best AUC that a model
can reach is known (`true_auc`).
"""

from __future__ import annotations

import hashlib
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parashard.data.arrays import ArraySource, Split
from parashard.data.base import DataSpec, Field, Indices
from parashard.data.options import ClicksOptions, DigitsOptions, SyntheticOptions
from parashard.data.portable_math import Float64s, exp, log, sigmoid
from parashard.errors import ConfigurationError
from parashard.plan.seeding import splitmix64
from parashard.plan.variables import Float32s
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
    """Overwrite counters with one number each: mean 0, variance 1, within 3.47 (four uniforms, rescaled)."""
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


_CELL_BITS = 14
_CELLS = 1 << _CELL_BITS
_GOLDEN = 0.6180339887498949  # neighbours in rank are far apart in a vocabulary
_BIAS = -1.0  # about 3 in 10 examples are clicks
_OF_KEYS, _OF_NUMBERS = 1.2, 0.6  # standard deviations of their contributions to the logit
_ALMOST_0 = 1e-6
_AT_ONCE = 1 << 14


Clicks = tuple[dict[str, Any], npt.NDArray[np.int64]]
"""Inputs "numbers", float32, and "keys", int64; and targets."""


class ClicksSource:
    """A `DataSource` of clicks: inputs "numbers", float32, and "keys", int64; the target is 1 for a click.

    - A column's id has rank r >= 0 with the probability of r + 1 <= x < r + 2, where x has a density proportional to
      x ** -zipf from 1 to vocabulary + 1 (uniform within each of 16,384 cells of equal probability).
    - Each rank has a place in the vocabulary. A window of `vocabulary` ids advances by `drift * vocabulary` over the
      training examples; a place's id is the one in the window that equals it modulo `vocabulary`. So ids are replaced
      one by one, frequent and rare alike.
    - A key is id * columns + column: equal ids of two columns have different keys.
    - logit = -1 + sum of the keys' hidden weights + sum of number * its hidden weight; P(click) = sigmoid(logit).

    Held-out example j is example `examples + j` of the same stream, so the window has moved on.
    """

    reads_ahead = any_thread = True

    def __init__(self, options: ClicksOptions) -> None:
        self._options = options
        digest = hashlib.shake_256(f"parashard clicks\0{options.seed}".encode()).digest(40)
        keys = np.frombuffer(digest, "<u8").tolist()
        self._id_key, self._number_key, self._label_key, self._weight_key, weight_key = keys
        self._edges = _edges(options.vocabulary, options.zipf)
        self._widths = np.diff(self._edges)
        self._stride = _coprime(options.vocabulary)
        self._columns = np.arange(options.columns, dtype=np.int64)
        self._numbers = np.arange(options.numbers, dtype=_U64)
        weights = normal_numbers(self._numbers.copy(), weight_key)
        self._number_weights = weights * (_OF_NUMBERS / math.sqrt(max(1, options.numbers)))
        # The sum of an example's uniform weights has the standard deviation _OF_KEYS.
        self._key_scale = 2 * _OF_KEYS * math.sqrt(3.0 / options.columns)
        text = json.dumps(options.plain(), separators=(",", ":"))
        self.spec = DataSpec(
            examples=options.examples,
            held_out=options.held_out,
            input_shape=(),
            classes=2,
            fingerprint=hashlib.sha256(f"clicks 1\0{text}".encode()).hexdigest(),
            fields=(
                Field("inputs/numbers", (options.numbers,), "float32"),
                Field("inputs/keys", (options.columns,), "int64"),
                Field("targets", (), "int64"),
            ),
        )

    def examples(self, indices: Indices) -> Clicks:
        """Return (inputs, targets) of the training examples with these indices, as new arrays."""
        return self._generated(np.asarray(indices, np.int64))

    def held_out(self, start: int, stop: int) -> Clicks:
        """Return (inputs, targets) of the held-out examples [start, stop), as new arrays."""
        first = self._options.examples
        return self._generated(np.arange(first + start, first + min(stop, self._options.held_out)))

    def true_logits(self, numbers: Float32s, keys: npt.NDArray[np.int64]) -> Float64s:
        """Return the logits that the labels of examples with these inputs are drawn from."""
        words = splitmix64(keys.astype(_U64), self._weight_key)
        weights = (words >> _U64(11)).astype(np.float64) * 2.0**-53 - 0.5
        logits = _BIAS + self._key_scale * _summed(weights)
        if numbers.shape[1]:
            logits += _summed(numbers * self._number_weights)
        return logits

    def _generated(self, indices: Indices) -> Clicks:
        keys, numbers = self._keys_of(indices), self._numbers_of(indices)
        words = splitmix64(indices.astype(_U64), self._label_key)
        uniform = (words >> _U64(11)).astype(np.float64) * 2.0**-53
        clicked = uniform < sigmoid(self.true_logits(numbers, keys))
        return {"numbers": numbers, "keys": keys}, clicked.astype(np.int64)

    def _keys_of(self, indices: Indices) -> npt.NDArray[np.int64]:
        options = self._options
        counters = (indices[:, None] * options.columns + self._columns).view(_U64)
        words = splitmix64(counters, self._id_key)
        cells = (words >> _U64(64 - _CELL_BITS)).view(np.int64)
        within = (words & _U64((1 << 50) - 1)).astype(np.float64) * 2.0**-50
        ranks = (self._edges.take(cells) + within * self._widths.take(cells)).astype(np.int64)
        ids: npt.NDArray[np.int64] = np.minimum(ranks, options.vocabulary - 1) * self._stride % options.vocabulary
        if options.drift:
            first = (indices * (options.drift * options.vocabulary / options.examples)).astype(np.int64)[:, None]
            ids += (first - ids + options.vocabulary - 1) // options.vocabulary * options.vocabulary
        ids *= options.columns
        ids += self._columns
        return ids

    def _numbers_of(self, indices: Indices) -> Float32s:
        counters = indices[:, None].astype(_U64) * _U64(self._options.numbers) + self._numbers
        return normal_numbers(counters, self._number_key).astype(np.float32)


def true_auc(source: ClicksSource) -> float:
    """Return the AUC of the true logits on the held-out split (ties count half); no model exceeds it but by chance."""
    logits, clicked = [], []
    for start in range(0, source.spec.held_out, _AT_ONCE):
        inputs, targets = source.held_out(start, start + _AT_ONCE)
        logits.append(source.true_logits(inputs["numbers"], inputs["keys"]))
        clicked.append(targets)
    values, places = np.unique(np.concatenate([np.empty(0), *logits]), return_inverse=True)
    targets = np.concatenate([np.empty(0, np.int64), *clicked])
    ones, zeros = (np.bincount(places[targets == one], minlength=len(values)) for one in (1, 0))
    pairs = int(ones.sum()) * int(zeros.sum())
    below = np.cumsum(zeros) - zeros
    return int((ones * (2 * below + zeros)).sum()) / (2 * pairs) if pairs else math.nan


def _edges(vocabulary: int, zipf: float) -> Float64s:
    """Return the edges of cells of equal probability, as ranks: the quantiles of x, minus 1."""
    # x(share) = (1 + share (L^a - 1)) ^ (1 / a), with L = vocabulary + 1 and a = 1 - zipf; L ^ share where a is 0.
    shares = np.arange(_CELLS) / _CELLS
    length, a = log(np.array([vocabulary + 1.0])), 1.0 - zipf
    logs = shares * length if abs(a) < _ALMOST_0 else log(1.0 + shares * (exp(a * length) - 1.0)) / a
    return np.append(exp(logs) - 1.0, float(vocabulary))


def _coprime(vocabulary: int) -> int:
    """Return a factor of ranks that is coprime to `vocabulary`, so that each rank has its own place."""
    stride = max(1, int(vocabulary * _GOLDEN))
    while math.gcd(stride, vocabulary) > 1:
        stride += 1
    return stride


def _summed(parts: Float64s) -> Float64s:
    """Return the sum of each row, added in order: the order of NumPy's `sum` depends on the CPU's vector width."""
    total: Float64s = np.cumsum(parts, axis=1)[:, -1]
    return total
