"""`parashard serve`: what it refuses, and what it says of a run that has nothing to serve yet."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import pytest

from parashard.cli import serve as module
from parashard.job.load import load_job
from parashard.launch.run_folders import LOCK_FILE, REPORT_FILE
from parashard.serving.server import run_of, why_not_yet
from support.command_line import Command, assert_refused, begun


def test_what_is_no_run(parashard: Command) -> None:
    assert_refused(parashard("serve", "nothing"), "'nothing' is no run; allowed: a run directory")


def test_other_hosts_than_this_one_need_a_word(parashard: Command) -> None:
    begun("small-1")
    assert_refused(parashard("serve", "small-1", "--host", "192.0.2.1"), "'192.0.2.1' is off loopback", "--insecure")
    assert_refused(parashard("serve", "small-1", "--host", "0.0.0.0", "--insecure"), "name one of this machine's")


def test_a_run_without_a_checkpoint_is_waited_for_until_it_is_asked_to_end(
    parashard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun("small-1")

    class Stops(threading.Event):
        """Is set by the signal that its first wait sends."""

        def wait(self, timeout: float | None = None) -> bool:
            signal.raise_signal(signal.SIGINT)
            return super().wait(timeout)

    monkeypatch.setattr(module, "threading", type("", (), {"Event": Stops}))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        ran = parashard("serve", "small-1")
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    lines = ran.out.splitlines()
    assert (ran.exit_code, ran.err) == (0, "")
    assert lines[0].startswith("gRPC 127.0.0.1:")
    assert lines[1].startswith("HTTP http://127.0.0.1:")
    assert lines[2] == "waiting: no checkpoint of job 'small' can be served yet: no plan is stored yet"


def test_a_run_that_is_over_without_one_is_said_to_be(parashard: Command) -> None:
    run_dir = begun("small-1")
    run = run_of(run_dir, load_job(Path("job.toml"), [], {}).job)
    run.look()
    assert why_not_yet(run, str(run_dir)) == "no checkpoint of job 'small' can be served yet: no plan is stored yet"
    (run_dir / REPORT_FILE).write_text(json.dumps({"state": "failed", "reason": "no worker"}))
    (run_dir / LOCK_FILE).touch()
    assert why_not_yet(run, str(run_dir)).endswith("; the run is over (failed: no worker)")
