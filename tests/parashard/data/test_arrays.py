"""ArraySource: conversion, copies, and a fingerprint of the content alone."""

import numpy as np
import pytest

from parashard.data.arrays import MAX_CLASSES, ArraySource, Split, class_labels, count_classes
from parashard.errors import BadData


def split(examples, dtype=np.float32, first=0):
    inputs = np.arange(first, first + examples * 2).reshape(examples, 2).astype(dtype)
    return Split(inputs, np.arange(examples, dtype=np.int64) % 3)


def test_serves_examples_by_index_and_held_out_by_range():
    source = ArraySource(split(5), split(3, first=100), classes=3)
    inputs, targets = source.examples(np.array([3, 0]))
    assert inputs.tolist() == [[6, 7], [0, 1]]
    assert targets.tolist() == [0, 0]
    inputs, targets = source.held_out(1, 3)
    assert inputs.tolist() == [[102, 103], [104, 105]]
    assert targets.tolist() == [1, 2]
    spec = source.spec
    assert (spec.examples, spec.held_out, spec.input_shape, spec.classes) == (5, 3, (2,), 3)


def test_bytes_become_scaled_float32():
    source = ArraySource(Split(np.array([[0], [51], [255]], np.uint8), np.zeros(3)), split(0, np.uint8), 0, 255.0)
    inputs, _ = source.examples(np.arange(3))
    assert inputs.dtype == np.float32
    assert inputs.ravel().tolist() == [0.0, np.float32(51) / np.float32(255), 1.0]


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_hands_out_copies(dtype, scale):
    source = ArraySource(split(4, dtype), split(4, dtype), classes=3, input_scale=scale)
    for read in (lambda: source.examples(np.arange(4)), lambda: source.held_out(0, 4)):
        inputs, targets = read()
        inputs += 7
        targets += 7
        assert inputs.sum() != read()[0].sum()
        assert targets.max() != read()[1].max()


def test_the_fingerprint_follows_the_content():
    def fingerprint(training, held_out, classes=3, scale=1.0):
        return ArraySource(training, held_out, classes, scale).spec.fingerprint

    base = fingerprint(split(5), split(3))
    assert base == fingerprint(split(5), split(3))
    assert len(base) == 64
    changed = split(5)
    changed.inputs[4, 1] += 1
    relabelled = split(5)
    relabelled.targets[4] += 1
    others = [
        fingerprint(changed, split(3)),
        fingerprint(relabelled, split(3)),
        fingerprint(split(5), split(3, first=1)),
        fingerprint(split(5, np.uint8), split(3)),
        fingerprint(split(5), split(0)),
        fingerprint(split(5), split(3), classes=4),
        fingerprint(split(5), split(3), scale=2.0),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_the_fingerprint_is_pinned():
    """It is part of the job's digest: a change refuses to resume every older run."""
    assert (
        ArraySource(split(5), split(3), 3).spec.fingerprint
        == "917e8a8abbdc0d5d4aea90afcfff0faf47b388c5a5d42e2784bb116cf3bc140e"
    )


@pytest.mark.parametrize("label", [-1, MAX_CLASSES])
def test_labels_out_of_range_are_named(label):
    with pytest.raises(BadData, match=rf"here.*found {label}"):
        class_labels(np.array([0, label]), "here")


def test_counts_classes_over_both_splits():
    assert count_classes(np.array([0, 4]), np.array([], np.int64)) == 5
    assert count_classes(np.array([0, 4]), np.array([6])) == 7
