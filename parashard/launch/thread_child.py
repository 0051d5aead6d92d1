"""ThreadChild: a child of a local cluster that is a thread of this process, as `subprocess.Popen` is a process.

Owns the thread, its stop and what became of it. A thread cannot be killed: one that is, or that hangs, is given up. It
counts as ended, loses the model lock (`parashard.process.model_lock`), and what it still does has no effect on the job,
for its name has a newer incarnation by then. Knows no worker. Made by `parashard.api.backends`, called by
`parashard.launch.local_cluster`.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable

from parashard.process.model_lock import abandon_model_lock
from parashard.process.shell import ExitCode, Stop

Work = Callable[[Stop, Callable[[str], None]], tuple[int, str]]
"""From a stop, and what to call with the reason when it hangs, to an exit code and why."""

_numbers = itertools.count(1)


class ThreadChild:
    """A thread that works until it is done or asked to stop.

    Attributes
    ----------
    pid : int
        Its number among all of this process; in the place of a process id.
    said : str
        Why it ended; "" if all is said by the exit code.
    """

    def __init__(self, name: str, work: Work) -> None:
        self.pid = next(_numbers)
        self.said = ""
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
        """Return what `poll` does: it has ended, or was given up."""
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
        """Take note of the first outcome; return whether this is it."""
        with self._deciding:
            if self._code is not None:
                return False
            self._code, self.said = int(code), said
            return True
