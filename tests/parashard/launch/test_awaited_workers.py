"""What a run without workers tells people: at once, then every minute, and again when the last one has gone."""

from __future__ import annotations

from parashard.launch.awaited_workers import REMIND_S, AwaitedWorkers

AT_ONCE = "no workers: the job waits until one joins: COMMAND"


def test_it_is_said_at_once_and_every_minute_until_a_worker_is_there() -> None:
    awaited = AwaitedWorkers("COMMAND")
    said = {now_s: awaited.look(now_s, 0) for now_s in (5.0, 6.0, 5.0 + REMIND_S, 6.0 + REMIND_S)}
    again = "no workers for 60 s: the job waits until one joins: COMMAND"
    assert said == {5.0: AT_ONCE, 6.0: "", 5.0 + REMIND_S: again, 6.0 + REMIND_S: ""}
    assert awaited.look(500.0, 1) == ""
    assert awaited.look(600.0, 0) == AT_ONCE
