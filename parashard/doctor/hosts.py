"""Queries this machine and the hosts of a file, each by one `ssh`, and has every pair measure its link both ways."""

from __future__ import annotations

import json
import os
import secrets
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic import ValidationError

from parashard.doctor.answering import LINE_BYTES_MAX
from parashard.doctor.facts import Clock, Host, Link, Machine, Network, Shared
from parashard.doctor.links import BULK_S, TOKEN_BYTES
from parashard.errors import ConfigurationError, Unavailable, Unreachable
from parashard.figures import counted, duration
from parashard.frozen_model import validated
from parashard.launch.host_file import SSH, NamedHost
from parashard.process.addresses import (
    OF_INTERFACE,
    WILDCARDS,
    Port,
    is_loopback,
    join_address,
    own_host,
    split_address,
)

HERE = "this machine"
MODULE = "parashard.doctor.answering"
LOOK_S = 60.0
ANSWER_S = 30.0
STORE_S = 180.0
"""Deadline of one question about the store; the store client's own timeouts are shorter."""
MEASURE_S = 600.0
CLOSE_S = 5.0
CLOCK_LOOKS = 5
AT_ONCE_MAX = 128
SAID_CHARACTERS_MAX = 200


class Asked(NamedTuple):
    """The settings of a job on these hosts."""

    host: str = ""
    """Address where its processes listen, in the syntax of `--host`; empty: no job is given."""
    here: tuple[Port, ...] = (0,)
    """Ports of its processes on this machine, all of which must be free; the first is measured."""
    there: tuple[Port, ...] = (0,)
    """The same on each host."""
    store: str = ""


class Remote:
    """One host's answering process; one thread at a time may ask it."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `wait` closes it
        self._heard = b""
        self.lost = ""
        self.client = ""
        """The address at which the host sees this machine; empty: not known."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env={key: value for key, value in os.environ.items() if key != "SSH_CONNECTION"},  # of the login here
        )

    @property
    def is_running(self) -> bool:
        """Whether the local process, `ssh` or this machine's answering process, still runs."""
        return self._process.poll() is None

    def ask(self, deadline_s: float = ANSWER_S, **question: Any) -> dict[str, Any]:
        """Return the answer to a question; raise Unreachable, with ssh's last output, now and at all later calls."""
        if self.lost:
            raise Unreachable(self.lost)
        until_s = time.monotonic() + deadline_s
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            while True:
                line = self._line(self._process.stdout.fileno(), until_s)
                with suppress(ValueError):  # a login shell may print other lines first
                    found = json.loads(line)
                    if isinstance(found, dict):
                        return found
        except OSError:
            self.lost = self._last_words()
            raise Unreachable(self.lost) from None

    def hang_up(self) -> None:
        """Close the process's input, which makes it end."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the local process, which ends a call that waits for an answer."""
        self._process.kill()

    def wait(self, until_s: float) -> None:
        """Wait for the process's end until `until_s` (of `time.monotonic()`), then kill it."""
        try:
            self._process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def _line(self, descriptor: int, until_s: float) -> bytes:
        while b"\n" not in self._heard:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                raise TimeoutError("no answer in time")
            more = os.read(descriptor, LINE_BYTES_MAX)
            if not more or len(self._heard) > LINE_BYTES_MAX:
                raise BrokenPipeError
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors.seek(0)
        said = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return said[-1].strip()[:SAID_CHARACTERS_MAX] if said else "no answer in time"


def look_at(named: Sequence[NamedHost], asked: Asked, tell: Callable[[str], None] = lambda text: None) -> Network:
    """Query this machine and these hosts, and have them measure; `tell` is called before each slow part."""
    words = ["-P", "-m", MODULE]
    commands = {HERE: [sys.executable, *words]}
    commands |= {host.name: [*SSH, host.name, shlex.join(["exec", host.python, *words])] for host in named}
    if named:
        tell(f"asking {counted(len(named), 'host')} by ssh")
    remotes: dict[str, Remote] = {}
    try:
        for name, command in commands.items():
            remotes[name] = _started(name, command)
        with ThreadPoolExecutor(min(AT_ONCE_MAX, len(remotes))) as pool:
            try:
                return _looked(remotes, asked, pool, tell)
            except BaseException:  # Ctrl-C: no thread must go on waiting for an answer
                pool.shutdown(wait=False, cancel_futures=True)
                for remote in remotes.values():
                    remote.kill()
                raise
    finally:
        for remote in remotes.values():
            remote.hang_up()
        until_s = time.monotonic() + CLOSE_S
        for remote in remotes.values():
            remote.wait(until_s)


def _started(name: str, command: Sequence[str]) -> Remote:
    try:
        return Remote(name, command)
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no program {command[0]} on this machine; install OpenSSH's client"
        ) from None
    except OSError as error:  # no more open files or processes
        raise Unavailable(
            f"{command[0]} for {name} cannot be started: {error.strerror}; `ulimit -a` has limits"
        ) from None


def _looked(
    remotes: Mapping[str, Remote], asked: Asked, pool: ThreadPoolExecutor, tell: Callable[[str], None]
) -> Network:
    token = secrets.token_bytes(TOKEN_BYTES).hex()

    def first(name: str) -> Host:
        alone = len(remotes) == 1 and asked.host
        host = asked.host if alone else listens_on(asked.host, here=name == HERE)
        ports = asked.here if name == HERE else asked.there
        return _first(remotes[name], token=token, host=host, ports=[str(port) for port in ports])

    hosts = dict(zip(remotes, pool.map(first, remotes), strict=True))
    good = [name for name, one in hosts.items() if not one.problem]
    pairs = rounds([name for name in good if hosts[name].listens_at])
    directions = 2 * sum(map(len, pairs))
    if directions:
        tell(f"measuring {directions} directions, about {2 * (BULK_S + 0.2) * len(pairs):.0f} s")
    links: dict[str, dict[str, Link]] = {name: {} for name in good}

    def both(pair: tuple[str, str]) -> None:
        for source, target in (pair, pair[::-1]):
            there = _address_for(remotes[source], hosts[target])
            if there:
                links[source][target] = _measured(remotes[source], there)

    until_s = time.monotonic() + MEASURE_S
    for number, at_once in enumerate(pairs):  # no host is in two pairs at once
        if time.monotonic() > until_s:
            tell(
                f"stopped after {duration(MEASURE_S)}: {sum(map(len, pairs[number:])) * 2} directions are not measured"
            )
            break
        list(pool.map(both, at_once))
    if asked.store:  # last, so that a silent store does not hide the other results
        tell(f"asking the store {asked.store}, at most {duration(2 * STORE_S)}")
        able = {name: hosts[name] for name in good if not remotes[name].lost}
        hosts |= _with_store(remotes, able, asked.store, pool)
    return Network(hosts=tuple(hosts.values()), links={source: to for source, to in links.items() if to})


def listens_on(host: str, *, here: bool) -> str:
    """Return where one of several machines listens for a job's host; empty: on the address that ssh connected to."""
    # As with `--on ssh:HOSTFILE` the host is this machine's address, unless each machine looks up its own. Loopback,
    # which no other machine reaches, is replaced by all addresses.
    if not here:
        return host if host == "auto" or host.startswith(OF_INTERFACE) else ""
    with suppress(ConfigurationError):  # the answering process will report it
        if not host or is_loopback(own_host(host)):
            return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    return host


def _first(remote: Remote, **question: Any) -> Host:
    host = Host(name=remote.name)
    try:
        answer = remote.ask(LOOK_S, do="look", **question)
        machine = validated(Machine, answer["machine"])
        clock = None if remote.name == HERE else _clock(remote)
    except Unreachable as error:
        return host.replaced(problem=error.message)
    except (KeyError, ValidationError, TypeError):
        said = str(answer.get("problem", "it has another version of parashard"))[:SAID_CHARACTERS_MAX]
        return host.replaced(problem=said)
    remote.client = str(answer.get("client", ""))
    return host.replaced(
        machine=machine,
        clock=clock,
        listens_at=str(answer.get("listens_at", "")),
        listen_problem=str(answer.get("listen_problem", "")),
    )


def _clock(remote: Remote) -> Clock:
    """Compare clocks by the quickest of `CLOCK_LOOKS` answers, as NTP does."""
    found = []
    for _ in range(CLOCK_LOOKS):
        since_s, asked_s = time.monotonic(), time.time()
        there_s = float(remote.ask(do="clock")["wall_s"])
        took_s = time.monotonic() - since_s
        found.append((took_s, there_s - asked_s - took_s / 2))
    took_s, ahead_s = min(found)
    return Clock(ahead_s=ahead_s, sure_s=took_s / 2)


def _with_store(
    remotes: Mapping[str, Remote], hosts: Mapping[str, Host], url: str, pool: ThreadPoolExecutor
) -> dict[str, Host]:
    """Test the store from all hosts: each writes a probe file, then reads those of the others."""
    run = secrets.token_hex(8)
    probes = {name: f"{run}-{number}" for number, name in enumerate(hosts)}
    seen = dict(zip(hosts, pool.map(lambda name: _written(remotes[name], url, probes[name]), hosts), strict=True))
    there = {probes[name]: name for name, one in seen.items() if not one.problem and not one.no_answer}

    def read(name: str) -> Host:
        store = seen[name]
        unseen: tuple[str, ...] = ()
        of_others = [probe for probe, writer in there.items() if writer != name]
        if probes[name] in there and of_others:
            try:
                answer = remotes[name].ask(STORE_S, do="read", probes=of_others).get("unseen", [])
                unseen = tuple(there[probe] for probe in answer if probe in of_others)
            except Unreachable:
                store = _unanswered(remotes[name], url)
        machine = hosts[name].machine
        assert machine is not None
        return hosts[name].replaced(machine=machine.replaced(store=store), unseen=unseen)

    return dict(zip(hosts, pool.map(read, hosts), strict=True))


def _written(remote: Remote, url: str, probe: str) -> Shared:
    try:
        answer = remote.ask(STORE_S, do="write", store=url, probe=probe)
        return validated(Shared, {"url": url} | answer)  # type: ignore[no-any-return]
    except Unreachable:
        return _unanswered(remote, url)
    except ValidationError:
        return Shared(url=url, problem="it has another version of parashard")


def _unanswered(remote: Remote, url: str) -> Shared:
    late = f"the store {url} did not answer in {STORE_S:.0f} s"
    return Shared(
        url=url, no_answer=late if remote.is_running else f"it was lost while it asked the store {url}: {remote.lost}"
    )


def _measured(remote: Remote, address: str) -> Link:
    try:
        return validated(Link, remote.ask(do="measure", address=address))  # type: ignore[no-any-return]
    except Unreachable as error:
        return Link(address=address, kind="failed", problem=error.message)
    except ValidationError:
        return Link(address=address, kind="failed", problem="it could not measure")


def _address_for(source: Remote, target: Host) -> str:
    """Return a host's address for another host; for this machine, if on all addresses, the one ssh came from."""
    host, port = split_address(target.listens_at)
    if host not in WILDCARDS:
        return target.listens_at
    return join_address(source.client, port) if source.client else ""


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return every pair once, in rounds in which no name is in two pairs (the circle method of tournaments)."""
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(one, other) for one, other in facing if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found
