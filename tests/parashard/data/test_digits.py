"""The bundled digits."""

import sys

import numpy as np
import pytest

from parashard.data.digits import DigitsOptions, open_digits
from parashard.errors import ConfigurationError


def test_serves_all_digits_in_two_parts():
    pytest.importorskip("sklearn")
    source = open_digits(DigitsOptions(held_out=0.25))
    spec = source.spec
    assert (spec.examples, spec.held_out, spec.input_shape, spec.classes) == (1348, 449, (64,), 10)
    inputs, targets = source.examples(np.arange(spec.examples))
    assert inputs.dtype == np.float32
    assert (inputs.min(), inputs.max()) == (0.0, 1.0)
    assert targets.dtype == np.int64
    assert set(targets.tolist()) == set(range(10))
    again, other = open_digits(DigitsOptions(held_out=0.25)), open_digits(DigitsOptions(held_out=0.25, split_seed=1))
    assert spec == again.spec
    assert spec.fingerprint != other.spec.fingerprint


def test_names_the_extra_where_scikit_learn_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigurationError, match=r"pip install parashard\[examples\]"):
        open_digits(DigitsOptions())
