"""A shard's process ends when saving takes too long, and not because it once saved."""

from __future__ import annotations

import threading

from parashard_server.__main__ import _ends_in_time


def test_a_shard_that_has_saved_in_time_ends_no_process() -> None:
    with _ends_in_time(60.0):
        late = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        assert len(late) == 1
    late[0].join(10.0)
    assert not late[0].is_alive()
