"""Run shards and workers on your own machines through OpenSSH's client (`--on ssh:HOSTFILE`).

`SshHosts` is a `Starter`. One `ssh` to each host runs a keeper there (`parashard.launch.keeper`), which starts the
processes; its standard input and output are the link. Either side cuts a link that is silent for `LINK_S`: the keeper
then ends its processes, and this side counts them as ended. So a process may still run on a lost host; its replacement
has a newer incarnation. Lost hosts are reconnected to without a limit on attempts. With TLS each host has its own key,
for which its keeper requests a certificate (`parashard.security.signing`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parashard import __version__
from parashard.errors import ConfigurationError, ParashardError, shortened
from parashard.job.load import as_toml
from parashard.launch.host_file import SSH, NamedHost, hosts_in
from parashard.launch.keeper import BEAT_S, LINK_S
from parashard.launch.local_cluster import last_output
from parashard.launch.runs import Run, signer_of
from parashard.launch.starting import END_GRACE_S, POLL_S, Ended, end_in_turn, write_probe
from parashard.process.addresses import boot_id, checked_address, is_loopback, own_host, same_address
from parashard.process.backoff import retry_pause_s
from parashard.process.best_effort import why_failed
from parashard.process.run_files import LOGS
from parashard.process.shell import ExitCode
from parashard.process.sigpipe import no_sigpipe
from parashard.protocol.rpc import check_reachable
from parashard.security.given_credentials import check_host
from parashard.security.identity import Identity, Role
from parashard.store import open_store

CONNECT_S = 60.0
"""Longest wait for all hosts to answer, and again for their certificates; after it the run is refused."""
CLOSE_S = 5.0
LINE_BYTES_MAX = 1 << 20
"""Longest line that a keeper may send."""


def host_for(name: str, hosts: Sequence[str], running: Mapping[str, str], wanted: int) -> str:
    """Return the host for a process; `wanted` is the total number of processes of its role."""
    # Each host gets an equal share of a role. A partly filled share is filled first, so that workers with neighbouring
    # numbers, which take a host's GPUs in turn, are on one host. Otherwise the host with the fewest processes is used.
    share = -(-wanted // len(hosts))

    def place(host: str) -> tuple[bool, bool, int]:
        there = [other for other, where in running.items() if where == host]
        alike = sum(other.partition("-")[0] == name.partition("-")[0] for other in there)
        return alike >= share, alike == 0, len(there)

    return min(hosts, key=place)


class _Link:
    """One connection to a host: an `ssh` process, and the keeper's messages."""

    def __init__(self, host: NamedHost, begin: bytes, log: Path) -> None:
        self.host = host
        self.ready: dict[str, Any] | None = None
        self.refused = ""
        """Why the host cannot take part."""
        self.leaves_s: float | None = None
        self.seen = "", ""
        """The addresses of this machine and of the host in this connection, as the host reports them."""
        self.is_here = False
        """Whether the host is this machine."""
        self.request = self.address = ""
        """The unanswered certificate request; and the address that the host looked up for itself, if it does so."""
        self.is_certified = False
        """Whether the host has stored a certificate."""
        self._log, self._heard, self._heard_s = log, b"", time.monotonic()
        self._broken = ""
        with log.open("ab") as errors:
            self._said_from = errors.tell()
            command = shlex.join(["exec", host.python, "-P", "-m", "parashard.launch.keeper"])
            self._ssh = subprocess.Popen(
                [*SSH, host.name, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C must reach only the launcher, which ends `ssh` last
                bufsize=0,
            )
        assert self._ssh.stdin is not None
        assert self._ssh.stdout is not None
        self._in, self._out = self._ssh.stdin, self._ssh.stdout
        for pipe in (self._in, self._out):
            os.set_blocking(pipe.fileno(), False)
        self._sending, self._unsent, self._sent_s = threading.Lock(), bytearray(), 0.0
        self.send(begin)

    def send(self, line: bytes) -> None:
        """Send a line without blocking; what the pipe has no room for goes out with later calls, and of `read`."""
        with self._sending:
            if not self._unsent:
                self._sent_s = time.monotonic()
            self._unsent += line + b"\n"
            self._write()

    def _write(self) -> None:
        with no_sigpipe():
            try:
                while self._unsent and (taken := self._in.write(self._unsent)):
                    del self._unsent[:taken]
                    self._sent_s = time.monotonic()
            except (OSError, ValueError):
                self._broken = "it has closed the link"

    def read(self) -> list[dict[str, Any]]:
        """Return the keeper's messages since the last call; other lines, such as a login shell's, are skipped."""
        if self._unsent:
            with self._sending:
                self._write()
        while len(self._heard) < LINE_BYTES_MAX and (more := self._read()):
            self._heard += more
            self._heard_s = time.monotonic()
        *lines, self._heard = self._heard.split(b"\n")
        found = []
        for line in lines:
            with suppress(ValueError):
                message = json.loads(line)
                found += [message] if isinstance(message, dict) else []
        return found

    def exit_code(self) -> int | None:
        """Return the exit code of `ssh`, or None while it runs."""
        return self._ssh.poll()

    def why_cut(self, code: int | None) -> str:
        """Return why the link is cut, or ""; `code` is the `exit_code` from before the last `read`."""
        patience_s = CONNECT_S if self.ready is None else LINK_S
        if self.refused:
            return self.refused
        if code is not None:
            said = [line for line in last_output(self._log, self._said_from) if line.strip()]
            return f"{said[-1].strip()[:300] if said else 'ssh has ended'} (exit code {code})"
        if time.monotonic() - self._heard_s > patience_s:
            return f"no answer for {patience_s:.0f} s"
        if self._unsent and time.monotonic() - self._sent_s > patience_s:
            return f"it has read nothing for {patience_s:.0f} s"
        return self._broken

    def close_input(self) -> None:
        """Close the keeper's input, which ends it and its processes."""
        with suppress(OSError):
            self._in.close()

    def close(self, until_s: float) -> None:
        """End `ssh`, by force at `until_s` (of `time.monotonic()`)."""
        self.close_input()
        with suppress(subprocess.TimeoutExpired):
            self._ssh.wait(max(0.0, until_s - time.monotonic()))
        self._ssh.kill()
        self._ssh.wait()
        self._out.close()

    def _read(self) -> bytes:
        try:
            return self._out.read(LINE_BYTES_MAX) or b""
        except (OSError, ValueError):
            return b""


class SshHosts:
    """Processes on the hosts of a host file: a `Starter`. Call `connect` first; it waits for all hosts."""

    def __init__(self, run: Run, hosts: Sequence[NamedHost], tell: Callable[[str], None]) -> None:
        self.launcher_address = ""
        self._run, self._hosts, self._tell = run, hosts, tell
        self._logs = run.folder / LOGS
        self._links: dict[str, _Link] = {}
        self._failures = dict.fromkeys((host.name for host in hosts), 0)
        self._retry_s = dict.fromkeys(self._failures, 0.0)
        self._running: dict[str, str] = {}  # host by process
        self._ended: list[Ended] = []
        self._count = 0
        self._signer = signer_of(run)
        self._owners: dict[str, str] = {}  # by address, the host that has a certificate for it
        self._probe = ""
        self._ending = False
        self._over = threading.Event()

    def connect(self) -> None:
        """Connect to all hosts at once; ConfigurationError names each host that failed, with the reason."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._probe = write_probe(self._run.store_url, self._run.folder)
        try:
            for host in self._hosts:
                self._open(host)
            threading.Thread(target=self._beat, name="hosts", daemon=True).start()
            self._await(lambda link: link.ready is not None)
            seen = [link.seen[0] for link in self._links.values()]
            self.launcher_address = launcher_address(own_host(self._run.job.cluster.listens_on), seen)
            self._check_addresses()
            self._await(self._is_up)
        except BaseException:
            self.end(0.0)
            raise

    @property
    def running(self) -> list[str]:
        """Names of the processes that have been started and not been reaped."""
        return list(self._running)

    def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Start a process on a host, listening at the host's address; if no host is up, it counts as ended at once."""
        assert name not in self._running, f"{name} runs already"
        up = [host for host, link in self._links.items() if self._is_up(link) and link.leaves_s is None]
        if not up:
            self._add_end(name, ExitCode.IO_ERROR, "it cannot be started: no host can be reached now")
            return
        options = self._run.job.cluster
        wanted = options.shards if name.startswith("shard") else options.workers
        host = self._running[name] = host_for(name, up, self._running, max(1, wanted))
        self._order(host, start=[name, module, [*arguments, "--host", self._address(self._links[host])]])

    def reap(self) -> list[Ended]:
        """Return the processes that ended, by their keeper's report or with a lost host; reconnect to lost hosts."""
        for link in list(self._links.values()):
            why = self._take_all(link)
            if why:
                self._lost(link, why)
        for host in () if self._ending else self._hosts:
            if host.name not in self._links and time.monotonic() >= self._retry_s[host.name]:
                self._open(host)
        ended, self._ended = self._ended, []
        return ended

    def coming_ends(self) -> Mapping[str, float]:
        """Return the processes on hosts whose keeper got SIGTERM, each with its deadline."""
        leaving = {host: link.leaves_s for host, link in self._links.items() if link.leaves_s is not None}
        return {name: leaving[host] for name, host in self._running.items() if host in leaving}

    def ask_to_end(self, name: str) -> None:
        """Send SIGTERM to a process if it is running."""
        self._order(self._running.get(name, ""), ask=name)

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process if it is running."""
        self._order(self._running.get(name, ""), kill=name)

    def end(self, grace_s: float = END_GRACE_S) -> None:
        """End every process, workers first, and the links."""
        self._ending = True
        end_in_turn(self, grace_s)
        self._over.set()
        for link in self._links.values():
            link.close_input()
        until_s = time.monotonic() + CLOSE_S  # of all together
        for link in self._links.values():
            link.close(until_s)
        self._links.clear()
        self._running.clear()
        with suppress(ParashardError):
            open_store(self._run.store_url).delete(self._probe)

    def _open(self, host: NamedHost) -> None:
        """Begin to connect to a host, or retry later if this machine cannot start an `ssh`."""
        job = self._run.job
        begin = {
            "version": __version__,
            "job": as_toml(job),
            "workers": -(-job.cluster.workers // len(self._hosts)),  # on one host, which share its cores
            "jax": "jax" in sys.modules,
            "link_s": LINK_S,
            "store": self._run.store_url,
            "probe": self._probe,
            "host": job.cluster.listens_on if self._is_looked_up else "",
            "identities": [] if self._signer is None else [identity.uri for identity in identities_of(host.name)],
        }
        log = self._logs / f"host-{re.sub('[^A-Za-z0-9.-]', '_', host.name)}.log"
        try:
            self._links[host.name] = _Link(host, json.dumps(begin).encode(), log)
        except FileNotFoundError:
            raise ConfigurationError(
                'cluster.launcher = "ssh:..." needs OpenSSH\'s client: there is no `ssh`'
            ) from None
        except OSError as error:
            self._put_off(host.name, why_failed(error))

    def _await(self, is_done: Callable[[_Link], bool]) -> None:
        """Wait until every host is done; the ConfigurationError names each that is not, with the reason."""
        wrong: dict[str, str] = {}
        until_s = time.monotonic() + CONNECT_S
        while waiting := [link for name, link in self._links.items() if not is_done(link) and name not in wrong]:
            for link in waiting:
                why = self._take_all(link)
                if not why and time.monotonic() > until_s:
                    why = f"has no certificate after {CONNECT_S:.0f} s" if link.ready else "is not ready"
                if why:
                    wrong[link.host.name] = why
            time.sleep(POLL_S)
        if wrong:
            raise ConfigurationError("; ".join(f"host {name}: {why}" for name, why in wrong.items()))

    def _why_refused(self, ready: Mapping[str, Any]) -> str:
        """Return why a host that has answered cannot take part, or ""."""
        if ready.get("version") != __version__:
            return f"has parashard {ready.get('version')}, and this machine {__version__}: install the same"
        if ready.get("store"):
            return (
                f"does not see the checkpoint store {self._run.store_url} ({ready['store']}); allowed as "
                "checkpoint.url: an object store, such as s3://BUCKET/PATH, or a folder that all hosts share"
            )
        try:
            addresses_in(str(ready.get("connection")))
        except ConfigurationError as error:
            return str(error)
        return ""

    def _take_all(self, link: _Link) -> str:
        """Handle a keeper's messages, as received now; return why the link is cut, or ""."""
        host, ssh_code = link.host.name, link.exit_code()
        for message in link.read():
            match message:
                case {"ready": dict(ready)} if why := self._why_refused(ready):
                    link.refused = why
                case {"ready": dict(ready)}:
                    link.ready, link.seen = ready, addresses_in(str(ready["connection"]))
                    link.is_here = ready.get("boot") == boot_id() != ""
                    link.request, link.address = str(ready.get("request", "")), str(ready.get("host", ""))
                    if self._failures[host]:
                        self._tell(f"host {host} is back")
                    self._failures[host] = 0
                case {"ended": [str(name), int(code), str(reason)]} if self._running.get(name) == host:
                    del self._running[name]
                    self._add_end(name, code, reason)
                case {"log": [str(name), str(text)]} if "/" not in name:
                    with suppress(OSError), (self._logs / f"{name}.log").open("a", encoding="utf-8") as log:
                        log.write(text)
                case {"leaving": int(left_s) | float(left_s)}:
                    link.leaves_s = time.monotonic() + left_s
                    self._tell(f"host {host} is about to go: its processes save, and are started elsewhere")
                case {"request": [str(text), str(address)]}:
                    link.request, link.address = text, address
                case {"has_certificate": True}:
                    link.is_certified = True
                case {"tell": str(text)}:
                    self._tell(f"host {host}: {text}")
        if self.launcher_address:  # before that no address is known
            self._certify(link)
        return link.why_cut(ssh_code)

    def _lost(self, link: _Link, why: str) -> None:
        """Report the processes of a lost host as ended, and schedule the reconnection."""
        host = link.host.name
        link.close(0.0)
        del self._links[host]
        self._put_off(host, why)
        self._retry_s[host] = max(self._retry_s[host], link.leaves_s or 0.0)
        for name in [name for name, where in self._running.items() if where == host]:
            del self._running[name]
            self._add_end(name, ExitCode.RETRY, f"its host {host} is lost: {why}")

    def _put_off(self, host: str, why: str) -> None:
        self._failures[host] += 1
        self._retry_s[host] = time.monotonic() + retry_pause_s(self._failures[host])
        if self._failures[host] == 1:
            self._tell(f"host {host} is lost: {why}; it is tried again")

    def _add_end(self, name: str, code: int, reason: str) -> None:
        self._count += 1
        self._ended.append(Ended(name, code, reason, self._count))

    def _order(self, host: str, **order: Any) -> None:
        if host in self._links:
            self._links[host].send(json.dumps(order).encode())

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            for link in list(self._links.values()):
                link.send(b"")

    def _is_up(self, link: _Link) -> bool:
        return link.ready is not None and (self._signer is None or link.is_certified)

    def _certify(self, link: _Link) -> None:
        """Answer a host's certificate request, for the identities of its processes and its address."""
        if self._signer is None or link.ready is None or not link.request:
            return
        request, link.request = link.request, ""
        try:
            answer = self._signer.answer(request, identities_of(link.host.name), self._certified_addresses(link))
        except ParashardError as error:
            link.refused = f"its request for a certificate is refused: {error}"
            return
        link.send(json.dumps({"certified": answer}).encode())

    def _certified_addresses(self, link: _Link) -> list[str]:
        """Return the address for a host's certificate; ConfigurationError if it is another machine's."""
        # The host itself reports it, so it must be neither the coordinator's address nor another host's.
        said = link.address if self._is_looked_up else link.seen[1]
        if not said:
            return []
        address = checked_address(said)
        if is_loopback(address) or same_address(address, self.launcher_address):
            if not link.is_here:
                raise ConfigurationError(f"its address is said to be {address}, which is this machine's")
            return [address if self._is_looked_up else self.launcher_address]
        owner = next((host for other, host in self._owners.items() if same_address(other, address)), link.host.name)
        if owner != link.host.name:
            raise ConfigurationError(f"its address is said to be {address}, which is that of host {owner}")
        self._owners[address] = owner
        return [address]

    @property
    def _is_looked_up(self) -> bool:
        """Whether each machine looks up the address that it listens at."""
        options = self._run.job.cluster
        return bool(options.interface) or options.host == "auto"

    def _address(self, link: _Link) -> str:
        """Return the address that a host listens at: the one that ssh reached, unless each machine looks up its own."""
        if self._is_looked_up:
            return self._run.job.cluster.listens_on
        return self.launcher_address if is_loopback(link.seen[1]) else link.seen[1]

    def _check_addresses(self) -> None:
        """Refuse to listen on networks without credentials, or here with a certificate that lacks our address."""
        options, credentials = self._run.job.cluster, self._run.credentials
        for address in dict.fromkeys([self.launcher_address, *map(self._address, self._links.values())]):
            if address == options.listens_on != self.launcher_address:
                continue  # each host checks its own
            check_host(address, options.insecure, credentials)
            if address != self.launcher_address:
                continue
            check_reachable(address)
            if credentials is not None:
                credentials.check_host(address)


def launcher_address(host: str, seen: Sequence[str]) -> str:
    """Return this machine's address for its hosts: `cluster.host`, else the one address in all their connections."""
    others = sorted({address for address in seen if not is_loopback(address)})
    if not is_loopback(host):
        return host
    if len(others) > 1:
        raise ConfigurationError(
            f"the hosts see this machine at {', '.join(others)}: set cluster.host to the address that all of them reach"
        )
    return others[0] if others else host


def addresses_in(connection: str) -> tuple[str, str]:
    """Return the addresses of this machine and of a host from the host's SSH_CONNECTION."""
    words = connection.split()
    if len(words) != 4:
        raise ConfigurationError(f"its connection is said to be {shortened(connection)!r}; allowed: what sshd says")
    return checked_address(words[0]), checked_address(words[2])


def identities_of(host: str) -> list[Identity]:
    """Return the identities of a host's processes, which share its certificate; the name is for logs."""
    name = f"host-{re.sub('[^A-Za-z0-9.-]', '_', host)}"[:63]
    return [Identity(Role.SHARD, name), Identity(Role.WORKER, name)]


def open_hosts(run: Run, file: Path, tell: Callable[[str], None]) -> SshHosts:
    """Connect to the hosts of a host file, and return them."""
    hosts = SshHosts(run, hosts_in(file), tell)
    hosts.connect()
    return hosts
