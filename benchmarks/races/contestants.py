"""Contestants as the races see them: programs that are started, asked for one round at a time, and ended.

Owns the processes and their time limits. All contestants are listed here: ours, peers in environments of their own,
and a single process without a server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers import seam
from benchmarks.peers.environments import python_of
from parashard.errors import JobFailed

START_S = 180.0
ROUND_S = 600.0
END_S = 20.0


@dataclass(frozen=True)
class Contestant:
    """A program that takes part: its name in tables, its command, and its additional environment variables."""

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def ours(name: str, settings: Sequence[str]) -> Contestant:
    """Return our contestant of the race of pushes and pulls, with these settings (KEY=VALUE) of the job."""
    words = [word for setting in settings for word in ("--set", setting)]
    return Contestant(name, (sys.executable, "-m", "benchmarks.races.ours", *words))


def no_server() -> Contestant:
    """Return the contestant without a server: the lower bound."""
    return Contestant("no server", (sys.executable, "-m", "benchmarks.races.in_place"))


def bare_socket() -> Contestant:
    """Return the contestant that is a TCP socket and a kernel: the lower bound across the network stack."""
    return Contestant("bare socket", (sys.executable, "-m", "benchmarks.races.bare_socket"))


def single_process(name: str, data: Path, settings: Sequence[str] = (), threads: int = 0) -> Contestant:
    """Return the contestant of the training race that has no server; by default on every core."""
    words = [word for setting in (f"data.path={data}", *settings) for word in ("--set", setting)]
    command = (sys.executable, "-m", "benchmarks.races.single_process", "--threads", str(threads), *words)
    return Contestant(name, command)


def peer(environments: Path, environment: str, name: str, module: str, *arguments: str) -> Contestant:
    """Return the contestant `benchmarks.peers.MODULE` in a peer's environment.

    Raises
    ------
    ConfigurationError
        If the environment is not there.
    """
    python = python_of(environments, environment)
    return Contestant(name, (str(python), "-m", f"benchmarks.peers.{module}", *arguments))


class Running:
    """A contestant's process, from its start until the end of the `with` block.

    Parameters
    ----------
    contestant : Contestant
        The program to run.

    Attributes
    ----------
    versions : dict of str to str
        The versions that the contestant reports, by package.

    Raises
    ------
    JobFailed
        If it does not start, ends, or does not answer in time.
    """

    def __init__(self, contestant: Contestant) -> None:
        self.name = contestant.name
        self._process = seam.start(
            contestant.words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **contestant.environment},
            start_new_session=True,
        )
        # Kills the whole group, however this process ends: some of Ray's processes would outlive their parents.
        self._guard = subprocess.Popen(
            ["sh", "-c", f"cat > /dev/null; kill -s KILL -- -{self._process.pid}"],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.versions: dict[str, str] = self._line(START_S)["versions"]
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def ask(self, request: Mapping[str, Any], deadline_s: float = ROUND_S) -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise JobFailed(f"contestant {self.name} has ended") from None
        return self._line(deadline_s)

    def end(self) -> None:
        """Let the program clean up, and kill whatever is left of it and its children."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass  # it is killed
        self._kill()
        self._process.wait()
        self._guard.kill()
        self._guard.communicate()

    def _line(self, deadline_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Timer(deadline_s, self._kill)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            raise JobFailed(f"contestant {self.name} ended, or gave no answer within {deadline_s:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all have ended


def in_turns(
    contestants: Sequence[Contestant], requests: Sequence[Mapping[str, Any]], rounds: int
) -> tuple[dict[str, list[list[dict[str, Any]]]], dict[str, dict[str, str]]]:
    """Have contestants answer each request `rounds` times, taking turns.

    Returns
    -------
    answers : dict of str to list of list of dict
        By contestant: for each request, the answer of each round.
    versions : dict of str to dict
        By contestant: its versions.
    """
    with ExitStack() as stack:
        running = [stack.enter_context(Running(contestant)) for contestant in contestants]
        answers: dict[str, list[list[dict[str, Any]]]] = {each.name: [] for each in running}
        for request in requests:
            for each in running:
                answers[each.name].append([])
            for _ in range(rounds):
                for each in running:
                    answers[each.name][-1].append(each.ask(request))
        return answers, {each.name: each.versions for each in running}
