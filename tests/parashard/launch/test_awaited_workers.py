"""What a run without workers tells people: at once or after a while, then every minute, and again for each wait."""

from __future__ import annotations

from parashard.launch.run_watch import REMIND_S, AwaitedWorkers

AT_ONCE = "no workers: the job waits until one joins"


def test_it_is_said_at_once_and_every_minute_until_a_worker_is_there() -> None:
    awaited = AwaitedWorkers("the job waits until one joins")
    said = {now_s: awaited.look(now_s, 0) for now_s in (5.0, 6.0, 5.0 + REMIND_S, 6.0 + REMIND_S)}
    again = "no workers for 60 s: the job waits until one joins"
    assert said == {5.0: AT_ONCE, 6.0: "", 5.0 + REMIND_S: again, 6.0 + REMIND_S: ""}
    assert awaited.look(500.0, 1) == ""
    assert awaited.look(600.0, 0) == AT_ONCE


def test_workers_that_are_expected_soon_have_some_time() -> None:
    awaited = AwaitedWorkers("each first runs train.py", 5.0)
    assert [awaited.look(now_s, 0) for now_s in (1.0, 5.0, 6.0, 7.0)] == [
        "",
        "",
        "no workers for 5 s: each first runs train.py",
        "",
    ]
    assert awaited.look(8.0, 2) == awaited.look(9.0, 0) == ""
