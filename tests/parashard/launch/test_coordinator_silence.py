"""How long a coordinator may be silent: while it starts, and once it serves."""

from __future__ import annotations

from parashard.launch.run_watch import CoordinatorSilence


def test_one_that_serves_is_killed_after_its_silence_and_not_again_at_once() -> None:
    silence = CoordinatorSilence(silence_s=5.0, start_s=100.0)
    silence.started(0.0)
    silence.heard(1.0)
    assert silence.look(6.0, serves=True) == ("", False)
    assert silence.look(6.1, serves=True) == ("the coordinator has not answered for 5 s; it is killed", True)
    assert silence.look(6.2, serves=True) == ("", False)


def test_its_silence_begins_when_it_is_seen_to_serve() -> None:
    silence = CoordinatorSilence(silence_s=5.0, start_s=100.0)
    silence.started(0.0)
    assert silence.look(50.0, serves=True) == ("", False)
    assert silence.look(55.1, serves=True)[1]


def test_a_slow_start_is_reported_once_and_killed_in_the_end() -> None:
    silence = CoordinatorSilence(silence_s=5.0, start_s=100.0)
    for _ in range(2):
        silence.started(0.0)
        assert silence.look(5.0, serves=False) == ("", False)
        assert silence.look(5.1, serves=False) == ("the coordinator has been starting for 5 s; it has 100 s", False)
        assert silence.look(100.0, serves=False) == ("", False)
        assert silence.look(100.1, serves=False) == ("the coordinator has not come up within 100 s; it is killed", True)
