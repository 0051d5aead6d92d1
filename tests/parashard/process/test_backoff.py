"""Debounce: told once when it begins, and once when it has been over for a while."""

from parashard.process.backoff import STEADY_S, Debounce


def test_it_is_told_once_and_once_more_when_it_is_over() -> None:
    debounce = Debounce()
    assert [debounce.begins(0.0), debounce.begins(1.0)] == [True, False]
    assert [debounce.ends(1.0 + STEADY_S), debounce.ends(99.0)] == [True, False]
    assert debounce.begins(100.0)


def test_what_fails_and_works_by_turns_is_one_trouble() -> None:
    debounce = Debounce()
    told = [debounce.begins(now_s) or debounce.ends(now_s + 1.0) for now_s in range(10)]
    assert told == [True, *[False] * 9]


def test_where_nothing_failed_nothing_ends() -> None:
    assert not Debounce().ends(99.0)
