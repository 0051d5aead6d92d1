"""The table of memory over time: growth is that of the second half, and a run that is too short has no verdict."""

from __future__ import annotations

import pytest

from benchmarks.races.push_pull import MIB
from benchmarks.soak import growth_mib_per_hour, judged, verdict

MINUTE = 60.0


def growing(mib_per_hour: float, minutes: int = 30) -> list[tuple[float, int]]:
    """Return a process that doubles in the first half, and grows evenly in the second."""
    halfway = minutes // 2
    return [(n * MINUTE, int(MIB * (100 + min(n, halfway) + mib_per_hour * n / 60))) for n in range(minutes + 1)]


@pytest.mark.parametrize("mib_per_hour", [0.0, 12.0, -6.0])
def test_growth_is_the_slope_of_the_second_half(mib_per_hour: float) -> None:
    assert growth_mib_per_hour(growing(mib_per_hour)) == pytest.approx(mib_per_hour, abs=0.01)


def test_of_one_sample_nothing_can_be_said() -> None:
    assert growth_mib_per_hour([(0.0, 5)]) == growth_mib_per_hour([]) == 0.0


@pytest.mark.parametrize(
    ("minutes", "again", "over"),
    [(30.0, [], ["leaky"]), (30.0, ["even"], ["even", "leaky"]), (5.0, ["even"], [])],
    ids=["one grows", "one was started again", "too short"],
)
def test_who_grows_or_was_started_again_breaks_the_bound(minutes: float, again: list[str], over: list[str]) -> None:
    figures = judged({"even": growing(0.0), "leaky": growing(17.0)}, minutes, 16.0, again)
    assert figures["over"] == over
    said = {0: "too short to judge"}.get(len(over), f"broken by {', '.join(over)}")
    assert said in verdict(figures, 1000)


def test_the_table_has_where_each_began_and_ended() -> None:
    row = judged({"even": growing(0.0)}, 30.0, 16.0, [])["mib"]["even"]
    assert (row["first"], row["halfway"], row["last"], row["most"]) == (100, 115, 115, 115)
