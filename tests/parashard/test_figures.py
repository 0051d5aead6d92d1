"""One format for each kind of number: what people read on every screen."""

from __future__ import annotations

import math

import pytest

from parashard.figures import count, counted, duration, mebibytes, metric, natural, percent, rate


def test_counts_have_separators_and_their_noun_has_a_number() -> None:
    assert [count(13500), rate(32336.4), mebibytes(3 << 34)] == ["13,500", "32,336", "49,152.0"]
    assert [counted(number, "step") for number in (0, 1, 2503)] == ["0 steps", "1 step", "2,503 steps"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.0000"),
        (0.96944, "0.9694"),
        (1.0, "1.0000"),
        (-2.5, "-2.5000"),
        (353.1234, "353.1234"),
        (13100.4954, "13,100.5"),
        (-41000.0, "-41,000.0"),
        (2.5e9, "2.5e+09"),
        (0.0085, "0.0085"),
        (0.0001234567, "0.0001235"),
        (5.328e-13, "5.328e-13"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_a_metric_of_any_size_can_be_read(value: float, shown: str) -> None:
    assert metric(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0.0 s"),
        (1.44, "1.4 s"),
        (87.0, "87 s"),
        (312.0, "5 min 12 s"),
        (179.6, "3 min 0 s"),
        (12000.0, "3 h 20 min"),
        (4e6, "1,111 h 6 min"),
    ],
)
def test_a_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_a_share() -> None:
    shares = (None, 0.0, 0.934, 1.0, -0.5, -1e-4)
    assert [percent(share) for share in shares] == ["-", "0 %", "93 %", "100 %", "-50 %", "0 %"]


def test_names_are_ordered_as_people_do() -> None:
    names = ["worker-10", "worker-2", "guest-1", "worker-2a", "worker", "7", "²"]
    assert sorted(names, key=natural) == ["guest-1", "worker", "worker-2", "worker-2a", "worker-10", "²", "7"]
