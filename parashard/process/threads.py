"""Workers as threads of this process: ThreadChild, with the interface of `subprocess.Popen`, and the model lock.

A thread cannot be killed. In place of that it is given up, as is one that hangs: it counts as ended, loses the model
lock, and its later calls have no effect on the job, because its name has a newer incarnation by then.

The lock serializes access to state of the whole process, such as PyTorch's default generator, which a step seeds and
then draws from, or a user's dataset, which need not be thread-safe. With one worker it is uncontended.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from parashard.process.shell import ExitCode, Stop

LOCK_WAIT_S = 600.0
"""Longest wait of a thread for the model lock."""


_changed = threading.Condition()
_holders: list[threading.Thread] = []  # of the lock: at most one
_given_up: WeakSet[threading.Thread] = WeakSet()


@contextmanager
def holding_model_lock() -> Iterator[None]:
    """Hold the model lock in a block, or in a function with this as its decorator; reentrant."""
    this = threading.current_thread()
    with _changed:
        again = this in _holders
        if not _changed.wait_for(lambda: this in _given_up or _holders in ([], [this]), LOCK_WAIT_S):
            raise TimeoutError(
                f"another thread of this process has computed for {LOCK_WAIT_S:.0f} s, and this one waits for it"
            )
        if this in _given_up:
            raise TimeoutError("this thread was given up, and does not get the model lock again")
        _holders[:] = [this]
    try:
        yield
    finally:
        if not again:
            with _changed:
                if this in _holders:
                    _holders.clear()
                    _changed.notify_all()


def abandon_model_lock(thread: threading.Thread) -> None:
    """Take the lock from a thread that was given up, and end its wait for it, though it may still be in its block."""
    with _changed:
        _given_up.add(thread)
        if thread in _holders:
            _holders.clear()
        _changed.notify_all()


Work = Callable[[Stop, Callable[[str], None]], tuple[int, str]]
"""Takes a stop, and a function to call with the reason when it hangs; returns an exit code and its reason."""

_numbers = itertools.count(1)


class ThreadChild:
    """A thread that works until it is done or asked to stop."""

    def __init__(self, name: str, work: Work) -> None:
        self.pid = next(_numbers)  # instead of a process id
        self.said = ""  # why it ended, if the exit code does not say all
        self._work = work
        self._stop = Stop()
        self._code: int | None = None
        self._given_up = False
        self._deciding = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"parashard-{name}", daemon=True)
        self._thread.start()

    @property
    def is_left_over(self) -> bool:
        """Whether it was given up, and still runs."""
        return self._given_up and self._thread.is_alive()

    def poll(self) -> int | None:
        """Return the exit code, once the thread has ended or was given up."""
        return None if self._thread.is_alive() and not self._given_up else self._code

    def terminate(self) -> None:
        """Ask it to stop."""
        self._stop.ask("asked to")

    def kill(self) -> None:
        """Give it up."""
        self._give_up(-signal.SIGKILL, "")

    def wait(self) -> int | None:
        """Return the exit code at once, as `poll`: a thread cannot be waited for without a bound."""
        return self.poll()

    def _run(self) -> None:
        code, said = int(ExitCode.FAILED), "its thread has died"
        try:
            code, said = self._work(self._stop, lambda reason: self._give_up(ExitCode.RETRY, reason))
        finally:
            self._ended(code, said)
            self._stop.ask("over")  # ends the worker's watching threads

    def _give_up(self, code: int, said: str) -> None:
        if self._ended(code, said):
            self._given_up = True
            abandon_model_lock(self._thread)
        self._stop.ask(said or "given up")

    def _ended(self, code: int, said: str) -> bool:
        """Record the first outcome; return whether this is it."""
        with self._deciding:
            if self._code is not None:
                return False
            self._code, self.said = int(code), said
            return True
