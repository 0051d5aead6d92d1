"""The handwritten digits that scikit-learn bundles: 1797 images of 8 x 8, the data that needs no download.

Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (its test part).
Called by `parashard.data.open_source`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from parashard.data.arrays import ArraySource, Split
from parashard.data.split import SplitOptions
from parashard.errors import ConfigurationError

_BRIGHTEST = 16.0


class DigitsOptions(SplitOptions):
    """The bundled digits; inputs of shape (64,) in [0, 1], 10 classes."""

    source: Literal["digits"] = Field(default="digits", description="scikit-learn's bundled handwritten digits.")


def open_digits(options: DigitsOptions) -> ArraySource:
    """Load the digits; ConfigurationError where scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError(
            f"the digits data comes with scikit-learn, which cannot be imported ({error}); "
            f"run: pip install parashard[examples]"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    digits = Split(pixels.astype(np.uint8), labels.astype(np.int64))
    training, held_out = options.rows(len(labels))
    return ArraySource(digits.take(training), digits.take(held_out), classes=10, input_scale=_BRIGHTEST)
