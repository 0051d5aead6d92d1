"""The bundled digits."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from parashard.data import synthetic
from parashard.data.synthetic import DigitsOptions, open_digits
from parashard.errors import ConfigurationError
from parashard.process.extras import install


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


def test_they_are_what_scikit_learn_loads_with_and_without_its_file(monkeypatch):
    pixels, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    from_file = open_digits(DigitsOptions(held_out=0))
    inputs, targets = from_file.examples(np.arange(len(labels)))
    np.testing.assert_array_equal(inputs, (pixels / 16).astype(np.float32))
    np.testing.assert_array_equal(targets, labels)
    monkeypatch.setattr(synthetic, "_FILE", Path("no", "such", "file"))
    assert open_digits(DigitsOptions(held_out=0)).spec == from_file.spec


def test_scikit_learn_is_not_imported():
    pytest.importorskip("sklearn")
    load = "from parashard.data.synthetic import DigitsOptions, open_digits; open_digits(DigitsOptions())"
    check = f"import sys; {load}; print(*{{'sklearn', 'scipy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_names_the_extra_where_scikit_learn_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr(synthetic, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=re.escape(install("examples"))):
        open_digits(DigitsOptions())
