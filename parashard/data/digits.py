"""The handwritten digits that scikit-learn bundles: 1797 images of 8 x 8, without a download.

Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (its test part).
Called by `parashard.data.open_source`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from parashard.data.arrays import ArraySource, Split
from parashard.data.options import DigitsOptions
from parashard.errors import ConfigurationError
from parashard.process.extras import install

_BRIGHTEST = 16.0
_FILE = Path("datasets", "data", "digits.csv.gz")  # in scikit-learn's package: 64 pixels and the label in each row


def open_digits(options: DigitsOptions) -> ArraySource:
    """Load the digits; ConfigurationError where scikit-learn is not installed."""
    rows = _rows()
    digits = Split(rows[:, :-1], rows[:, -1].astype(np.int64))
    training, held_out = options.rows(len(rows))
    return ArraySource(digits.take(training), digits.take(held_out), classes=10, input_scale=_BRIGHTEST)


def _rows() -> np.ndarray:
    """Return pixels and labels as uint8 of shape (1797, 65).

    They are read without importing scikit-learn, which would cost each process more than a second.
    """
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations or []) if package else []:
        if (file := Path(folder) / _FILE).is_file():
            return np.loadtxt(file, np.uint8, delimiter=",")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError(
            f"the digits data comes with scikit-learn, which cannot be imported ({error}); run: {install('examples')}"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels]).astype(np.uint8)
