"""The answering side of `parashard doctor HOSTFILE`: answers lines of JSON until its input ends, or for `LIFE_S`."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, BinaryIO

from parashard.doctor import machine
from parashard.doctor.links import Listener, listening, measure
from parashard.errors import ConfigurationError, ParashardError, Unavailable
from parashard.process.addresses import is_loopback, own_host, port_of

LIFE_S = 1200.0
LINE_BYTES_MAX = 1 << 20


class Answers:
    """A host's answers; its state is a listener, and the probe file that it has written."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._connection = environ.get("SSH_CONNECTION", "").split()
        self._token = b""
        self._listener: Listener | None = None
        self._written = "", ""

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one question."""
        match asked:
            case {"do": "look", "token": token, "host": host, "ports": ports}:
                self._token = bytes.fromhex(token)
                # The address at which this host sees the asking machine; empty: not known.
                client = _plain(self._connection[0]) if len(self._connection) == 4 else ""
                return {"machine": machine.machine().plain(), "client": client, **self._listen(host, ports)}
            case {"do": "clock"}:
                return {"wall_s": time.time()}
            case {"do": "measure", "address": address}:
                return measure(address, self._token).plain()
            case {"do": "write", "store": store, "probe": probe}:
                self._written = store, probe
                return machine.shared(store, probe).plain()
            case {"do": "read", "probes": probes}:
                return {"unseen": machine.unseen(self._written[0], probes)}
        return {"problem": f"an unknown question: {str(asked)[:80]}"}

    def close(self) -> None:
        """Close the listener and delete the probe file."""
        if self._listener is not None:
            self._listener.close()
        if self._written[0]:
            machine.forget(*self._written)

    def _listen(self, host: str, ports: Sequence[str]) -> dict[str, Any]:
        """Listen where a job's processes would: on the job's host, else on the address that ssh connected to."""
        found = {}
        try:
            where = own_host(host) if host else ""
            if (not where or is_loopback(where)) and len(self._connection) == 4:
                where = _plain(self._connection[2])
            self._listener = Listener(where or "127.0.0.1", port_of(ports[0]), self._token)
            found["listens_at"] = self._listener.address
            with ExitStack() as taken:  # all at once: a range has to have enough that are free
                for port in ports[1:]:
                    taken.enter_context(listening(where or "127.0.0.1", port_of(port)))
        except (ConfigurationError, Unavailable) as error:
            found["listen_problem"] = error.message
        return found


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")  # IPv4, if sshd has one socket for both families


def answer_lines(source: BinaryIO, say: Callable[[bytes], None], environ: Mapping[str, str] = os.environ) -> None:
    """Answer each line of `source` by a line, until its end."""
    until_s = time.monotonic() + LIFE_S
    answers, heard, more = Answers(environ), b"", b"-"
    try:
        while more and select.select([source], [], [], max(0.0, until_s - time.monotonic()))[0]:
            more = os.read(source.fileno(), LINE_BYTES_MAX)
            *lines, heard = (heard + more).split(b"\n")
            if len(heard) > LINE_BYTES_MAX:
                return
            for line in lines:
                say(json.dumps(_answered(answers, line)).encode() + b"\n")
    except BrokenPipeError:  # the asking side has gone
        return
    finally:
        answers.close()


def _answered(answers: Answers, line: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(line)
        return answers.answer(asked if isinstance(asked, dict) else {})
    except (ParashardError, OSError, ValueError) as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer on standard input and output; output of libraries goes to standard error."""
    output = os.dup(1)
    os.dup2(2, 1)

    def say(line: bytes) -> None:
        while line:
            line = line[os.write(output, line) :]

    answer_lines(sys.stdin.buffer, say)


if __name__ == "__main__":
    main()
