"""Trouble: told once when it begins, and once when it has been over for a while."""

from parashard.process.trouble import STEADY_S, Trouble


def test_it_is_told_once_and_once_more_when_it_is_over() -> None:
    trouble = Trouble()
    assert [trouble.begins(0.0), trouble.begins(1.0)] == [True, False]
    assert [trouble.ends(1.0 + STEADY_S), trouble.ends(99.0)] == [True, False]
    assert trouble.begins(100.0)


def test_what_fails_and_works_by_turns_is_one_trouble() -> None:
    trouble = Trouble()
    told = [trouble.begins(now_s) or trouble.ends(now_s + 1.0) for now_s in range(10)]
    assert told == [True, *[False] * 9]


def test_where_nothing_failed_nothing_ends() -> None:
    assert not Trouble().ends(99.0)
