"""Rows of the races: a ratio is of medians, its spread of single rounds, and the target is judged by the ratio."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.races.rows import TARGETS, as_json, compared, markdown, milliseconds

TIMES_MS = st.lists(st.tuples(*[st.floats(1e-3, 1e6)] * 2), min_size=1, max_size=9)


class TestCompared:
    def test_the_ratio_says_how_many_times_faster_we_are(self) -> None:
        row = compared("same host", "4 MiB", ("shm", [1.0, 2.0, 3.0]), ("TensorFlow", [6.0, 12.0, 30.0]))

        assert (row.ours_ms, row.peer_ms, row.ratio) == (2.0, 12.0, 6.0)
        assert (row.ratio_low, row.ratio_high, row.rounds) == (6.0, 10.0, 3)

    @pytest.mark.parametrize(("peer_ms", "reached"), [(5.0, True), (4.99, False)])
    def test_a_target_is_reached_or_not(self, peer_ms: float, reached: bool) -> None:
        row = compared("same host", "64 MiB", ("shm", [1.0]), ("TensorFlow", [peer_ms]), "push + pull")

        assert (row.size, row.target, row.reached) == ("64 MiB, push + pull", 5.0, reached)

    def test_without_a_target_nothing_is_reached_or_missed(self) -> None:
        row = compared("same host", "64 MiB", ("shm", [1.0]), ("no server", [0.1]))

        assert (row.target, row.reached) == (None, None)

    def test_rounds_that_were_not_next_to_each_other_are_not_compared(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            compared("same host", "1 MiB", ("shm", [1.0, 1.0]), ("Ray", [1.0]))

    @given(TIMES_MS)
    def test_who_is_called_ours_turns_the_ratio_over(self, times_ms: list[tuple[float, float]]) -> None:
        one, other = (("one", [t[0] for t in times_ms]), ("other", [t[1] for t in times_ms]))

        there, back = compared("r", "s", one, other), compared("r", "s", other, one)

        assert there.ratio * back.ratio == pytest.approx(1.0)
        assert there.ratio_low * back.ratio_high == pytest.approx(1.0)


class TestTables:
    ROW = compared("across TCP", "4 MiB", ("tcp", [2.0, 2.0]), ("TensorFlow", [6.0, 4.0]))

    def test_a_row_in_markdown(self) -> None:
        last = markdown([self.ROW]).splitlines()[-1]

        assert last == "| across TCP | 4 MiB | tcp | 2 | TensorFlow | 5 | 2.50 (2.00 to 3.00) | 2 | yes |"

    def test_a_row_in_json_has_what_others_read(self) -> None:
        (row,) = as_json([compared("r", "s", ("a", [3.0]), ("b", [1.0]))])

        assert row["ratio"] == 0.3333
        assert {"race", "size", "ours_ms", "peer", "peer_ms", "ratio", "target", "reached"} <= row.keys()

    @pytest.mark.parametrize(("value_ms", "text"), [(0.04567, "0.0457"), (12.345, "12.3"), (1430.2, "1,430")])
    def test_three_digits_count(self, value_ms: float, text: str) -> None:
        assert milliseconds(value_ms) == text

    def test_no_target_is_slower_than_the_peer(self) -> None:
        assert min(TARGETS.values()) >= 1
