"""Synthetic examples: a function of the index, on every machine, of any number."""

import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from parashard.data import generated
from parashard.data.generated import DigitsOptions, SyntheticOptions, SyntheticSource, open_digits
from parashard.errors import ConfigurationError
from parashard.frozen_model import validated
from parashard.process.extras import install


def test_serves_what_the_options_say():
    source = SyntheticSource(SyntheticOptions(examples=100, held_out=20, features=3, classes=4))
    spec = source.spec
    assert (spec.examples, spec.held_out, spec.input_shape, spec.classes) == (100, 20, (3,), 4)
    inputs, targets = source.examples(np.arange(100))
    assert (inputs.shape, inputs.dtype) == ((100, 3), np.float32)
    assert (targets.shape, targets.dtype) == ((100,), np.int64)
    assert set(targets.tolist()) == {0, 1, 2, 3}
    assert len(source.held_out(15, 30)[1]) == 5


@given(st.lists(st.integers(0, 2**40 - 1), max_size=20), st.integers(0, 2**64))
def test_an_example_does_not_depend_on_its_company(indices, seed):
    source = SyntheticSource(SyntheticOptions(examples=2**40, features=2, seed=seed))
    inputs, targets = source.examples(np.array(indices, np.int64))
    for i, index in enumerate(indices):
        alone = source.examples(np.array([index]))
        assert np.array_equal(alone[0][0], inputs[i])
        assert alone[1][0] == targets[i]


def test_held_out_examples_are_new_ones():
    source = SyntheticSource(SyntheticOptions(examples=50, held_out=50))
    rows = np.concatenate([source.examples(np.arange(50))[0], source.held_out(0, 50)[0]])
    assert len(np.unique(rows[:, 0])) == 100


def test_clusters_have_the_noise_that_was_asked_for():
    source = SyntheticSource(SyntheticOptions(examples=20_000, features=8, classes=3, noise=0.5))
    inputs, targets = source.examples(np.arange(20_000))
    for label in range(3):
        cluster = inputs[targets == label]
        assert abs(len(cluster) / 20_000 - 1 / 3) < 0.02
        assert np.allclose(cluster.std(axis=0), 0.5, atol=0.02)
    centres = np.stack([inputs[targets == label].mean(axis=0) for label in range(3)])
    nearest = ((inputs[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == targets).mean() > 0.95
    still = SyntheticSource(SyntheticOptions(examples=100, features=8, classes=3, noise=0))
    assert len(np.unique(still.examples(np.arange(100))[0], axis=0)) == 3


def test_the_bits_are_pinned_for_ever():
    source = SyntheticSource(SyntheticOptions(examples=1000, features=2, classes=3, seed=5))
    inputs, targets = source.examples(np.array([0, 999]))
    assert inputs.view(np.uint32).tolist() == [[1066665201, 1066832143], [1064172328, 3211622277]]
    assert targets.tolist() == [1, 0]


def test_the_fingerprint_follows_every_parameter():
    changes = [{}, {"examples": 9}, {"held_out": 9}, {"features": 9}, {"classes": 9}, {"noise": 0.9}, {"seed": 9}]
    fingerprints = [SyntheticSource(SyntheticOptions(**change)).spec.fingerprint for change in changes]
    assert len(set(fingerprints)) == len(changes)
    assert fingerprints[0] == SyntheticSource(SyntheticOptions()).spec.fingerprint


@pytest.mark.parametrize(
    "wrong",
    [
        {"examples": 0},
        {"examples": 2**40 + 1},
        {"features": 0},
        {"classes": 1},
        {"noise": -1},
        {"noise": float("inf")},
        {"classes": 2**16, "features": 2**20},
        {"unknown": 1},
    ],
)
def test_refuses_options_out_of_range(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        validated(SyntheticOptions, wrong)


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


def test_they_are_what_scikit_learn_loads():
    pixels, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    from_file = open_digits(DigitsOptions(held_out=0))
    inputs, targets = from_file.examples(np.arange(len(labels)))
    np.testing.assert_array_equal(inputs, (pixels / 16).astype(np.float32))
    np.testing.assert_array_equal(targets, labels)


def test_scikit_learn_is_not_imported():
    pytest.importorskip("sklearn")
    load = "from parashard.data.generated import DigitsOptions, open_digits; open_digits(DigitsOptions())"
    check = f"import sys; {load}; print(*{{'sklearn', 'scipy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_names_the_extra_where_scikit_learn_is_missing(monkeypatch):
    monkeypatch.setattr(generated, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=re.escape(install("examples"))):
        open_digits(DigitsOptions())
