"""The keeper of a host: `python -P -m parashard.launch.keeper`, which `parashard.launch.hosts` starts there by ssh.

Its standard input and output are the link to the launcher: lines of JSON, with empty lines as heartbeats. It starts,
ends and reaps processes on the launcher's orders, by its own `LocalCluster`, and sends their ends and logs. When the
link closes, or is silent for `LINK_S`, every process ends; at SIGTERM it reports that its host is about to go. Nothing
stays on the host: logs and certificates are in a temporary folder, which is removed however the keeper ends.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parashard import __version__
from parashard.errors import ConfigurationError, ParashardError
from parashard.job.load import job_from_toml
from parashard.launch.local_cluster import LocalCluster
from parashard.launch.runs import child_variables
from parashard.launch.starting import PROBE_BYTES_MAX, self_removing_folder
from parashard.process.addresses import boot_id, own_host
from parashard.process.shell import ExitCode, end_process
from parashard.security.identity import identities_in
from parashard.store import open_store

if TYPE_CHECKING:
    from parashard.security.signing import LocalKey

BEAT_S = 1.0
LINK_S = 20.0
"""A link without a heartbeat from the other side for longer counts as cut."""
LEAVE_S = 30.0
"""How long the processes of a host that is about to go have to save."""
HOST_LOOK_S = 10.0
"""Between two looks of a host for a changed address, if it looks its address up."""
STUCK_S = 5.0
TURN_S = 0.05
LOG_BYTES = 1 << 16  # of one log that are sent in a turn


class Keeper:
    """The processes of a run on this host."""

    def __init__(self, begin: Mapping[str, Any], folder: Path, output: int) -> None:
        self._output = output
        self._cluster = LocalCluster(folder)
        self._cluster.tell = lambda text: self._send({"tell": text})
        self._more: list[str] = []
        self._key: LocalKey | None = None
        if begin["identities"]:
            from parashard.security.signing import LocalKey  # here: slow to import, and needed only with TLS

            self._key = LocalKey(folder / "tls", identities_in(begin["identities"]))
            self._more = ["--tls-dir", str(folder / "tls")]
        job = job_from_toml(begin["job"])
        job = job.replaced(cluster=job.cluster.replaced(workers=begin["workers"]))
        self._cluster.variables = child_variables(job, os.environ, jax=begin["jax"])
        self._named, self._host, self._look_s = begin["host"], own_address(begin["host"]), 0.0
        self._sent_bytes: dict[str, int] = {}  # of the log of each name
        self._leaving = self._told = False
        self._sending = threading.Lock()
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None: the link is cut

    def run(self, ready: Mapping[str, Any]) -> None:
        """Report that this host is ready, and execute orders until the link is cut or the host has been left."""
        signal.signal(signal.SIGTERM, self._leave)
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            request = "" if self._key is None else self._key.due()
            self._send({"ready": {**ready, "request": request, "host": self._host}})
            while not (self._leaving and not self._cluster.running):
                try:
                    order = self.orders.get(timeout=TURN_S)
                except queue.Empty:
                    order = {}
                if order is None:
                    return
                self._obey(order)
                self._report()
        except OSError:  # nobody reads any more
            return
        finally:
            self._cluster.end(0.0)

    def _obey(self, order: Mapping[str, Any]) -> None:
        match order:
            case {"start": [name, module, words]}:
                self._sent_bytes.setdefault(name, 0)
                self._cluster.start(name, module, [*words, *self._more])
            case {"ask": name}:
                self._cluster.ask_to_end(name)
            case {"kill": name}:
                self._cluster.kill(name)
            case {"certified": answer} if self._key is not None:
                try:
                    self._key.take(answer)
                except ConfigurationError as error:  # such as a full disk, which may have room later
                    self._send({"tell": str(error)})
                if self._key.wait(0.0):  # before that the launcher starts nothing here
                    self._send({"has_certificate": True})

    def _report(self) -> None:
        ended = self._cluster.reap()
        self._look_at_host()
        if self._key is not None and (request := self._key.due()):
            self._send({"request": [request, self._host]})
        for name, sent in self._sent_bytes.items():
            text = _read(self._cluster.log_path(name), sent)
            if text:
                self._sent_bytes[name] = sent + len(text)
                self._send({"log": [name, text.decode(errors="replace")]})
        for one in ended:
            self._send({"ended": [one.name, one.exit_code, one.reason]})
        if self._leaving and not self._told:
            self._told = True
            self._send({"leaving": LEAVE_S})

    def _look_at_host(self) -> None:
        """Request a new certificate if this host's address has changed."""
        if self._key is None or not self._named or time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + HOST_LOOK_S
        host = own_address(self._named)
        if host and host != self._host:
            self._host = host
            self._key.ask()

    def _leave(self, *_: object) -> None:
        self._leaving = True

    def _beat(self) -> None:
        """Send heartbeats, also while the main thread waits for the imports of the first process."""
        with suppress(OSError):  # the main thread sees that, too
            while True:
                time.sleep(BEAT_S)
                self._send(None)

    def _send(self, message: Mapping[str, Any] | None) -> None:
        left = (b"" if message is None else json.dumps(message).encode()) + b"\n"
        with self._sending:
            while left:
                left = left[os.write(self._output, left) :]


def _read(log: Path, start_bytes: int) -> bytes:
    try:
        with log.open("rb") as file:
            file.seek(start_bytes)
            return file.read(LOG_BYTES)
    except OSError:  # it could not be opened for writing either
        return b""


def _listen(link: int, link_s: float, first: bytes, orders: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Pass orders on until the link is cut; then end this process if it has not ended by itself."""
    try:
        _pass_on(link, link_s, first, orders)
        orders.put(None)
        time.sleep(STUCK_S)
    finally:
        os._exit(ExitCode.RETRY)


def _pass_on(link: int, link_s: float, heard: bytes, orders: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    waiting = select.poll()
    waiting.register(link, select.POLLIN)
    while True:
        *lines, heard = heard.split(b"\n")
        for line in lines:
            if line:
                orders.put(json.loads(line))
        more = os.read(link, LOG_BYTES) if waiting.poll(1000 * link_s) else b""
        if not more:
            return
        heard += more


def _first_line(link: int) -> tuple[bytes, bytes]:
    """Return the first line of a link and the bytes after it; EOFError if there is none in time."""
    heard, waiting = b"", select.poll()
    waiting.register(link, select.POLLIN)
    while b"\n" not in heard:
        more = os.read(link, LOG_BYTES) if waiting.poll(1000 * LINK_S) else b""
        if not more:
            raise EOFError
        heard += more
    line, _, rest = heard.partition(b"\n")
    return line, rest


def _why_not_stored(url: str, probe: str) -> str:
    """Return why this host does not see the launcher's probe in the store, or ""."""
    try:
        open_store(url).read(probe, PROBE_BYTES_MAX)
    except ParashardError as error:
        return str(error)
    return ""


def own_address(host: str) -> str:
    """Return this host's address for `cluster.interface`, or "" if it has none, which its processes report."""
    with suppress(ParashardError):
        return own_host(host)
    return ""


def main() -> int:
    """Run the keeper of one host."""
    output = os.dup(1)
    os.dup2(2, 1)  # other output does not get into the link
    try:
        line, rest = _first_line(0)
    except EOFError:
        return ExitCode.RETRY
    begin = json.loads(line)
    connection = os.environ.get("SSH_CONNECTION", "127.0.0.1 0 127.0.0.1 0")
    ready = {"version": __version__, "connection": connection, "boot": boot_id()}
    if begin["version"] != __version__:  # its job may have keys that are unknown here
        os.write(output, json.dumps({"ready": {**ready, "store": ""}}).encode() + b"\n")
        return ExitCode.CONFIGURATION
    keeper = Keeper(begin, self_removing_folder(), output)
    threading.Thread(target=_listen, args=(0, begin["link_s"], rest, keeper.orders), daemon=True).start()
    store = _why_not_stored(begin["store"], begin["probe"])
    keeper.run({**ready, "store": store})
    return ExitCode.DONE


if __name__ == "__main__":
    end_process(main())
