"""RayKeeper: an actor of Ray that starts one process of a run as its child, and reports its output and its end.

Only JSON texts cross Ray; a private key stays on the node that made it (`parashard.security.signing`). The child ends
with its actor, however that ends: only the actor's process has the write end of the child's lifeline, and the kernel
kills it with the thread that started it. `parashard.launch.ray_cluster` decides which process is started.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from parashard.errors import ConfigurationError, NotStored, ParashardError, Unreachable
from parashard.launch.local_cluster import LocalCluster, ScriptCommand
from parashard.launch.starting import PROBE_BYTES_MAX, Ended, self_removing_folder
from parashard.process.addresses import own_host
from parashard.process.shell import ExitCode, exit_code_of
from parashard.protocol.coordinator_client import coordinator_in
from parashard.security.identity import identities_in
from parashard.store import open_store

if TYPE_CHECKING:
    from parashard.security.signing import LocalKey

LOOK_S = 0.05
OUTPUT_LOOK_S = 0.5  # a look costs as much as a small step, and every process has a keeper
NEWS_S = 30.0
"""How long one call waits for news."""
OUTPUT_BYTES_MAX = 256 * 1024
"""Largest part of a log in one answer."""


class ProcessSpec(NamedTuple):
    """The process that a keeper starts."""

    name: str  # such as worker-0
    module: str
    words: list[str]
    host: str  # that it listens on, which each machine looks up; "": its node's address in Ray
    variables: dict[str, str]
    run_dir: str
    folder: str  # the launcher's working directory
    script: list[str]  # words after `python`, for a worker that is a script run again; empty: it is the module
    store: str
    probe: str  # a name in the store, which this node must find
    advice: str  # for the user if it does not
    identity: str = ""  # a URI, to request a certificate for; "": no TLS, or a certificate in --tls-dir


class News(NamedTuple):
    """A keeper's report, with the log from an offset on."""

    node: str  # id of the node
    output: str
    offset: int  # in bytes, after `output`
    exit_code: int | None = None  # of a process that ended, once all of its output is reported
    reason: str = ""
    request: str = ""  # for a certificate
    host: str = ""  # the address that it listens on; "": it has none, which its child reports


class RayKeeper:
    """Starts its child at once; each call may come at any time and more than once."""

    def __init__(self, spec: str) -> None:
        self._spec = ProcessSpec(**json.loads(spec))
        ray = importlib.import_module("ray")
        self._node = str(ray.get_runtime_context().get_node_id())
        self._address = str(ray.util.get_node_ip_address())
        self._script = self._spec.script
        if ray.get_runtime_context().runtime_env.get("working_dir"):  # this process is in a copy of it
            self._script = [word.removeprefix(f"{self._spec.folder}{os.sep}") for word in self._script]
        elif Path(self._spec.folder).is_dir():
            os.chdir(self._spec.folder)
        self._cluster = LocalCluster(_log_folder() / f"parashard-{Path(self._spec.run_dir).name}", forks=False)
        self._log = self._cluster.log_path(self._spec.name)
        self._log.touch()
        self._begin = self._log.stat().st_size  # before it: output of earlier processes of this name
        self._asked = threading.Event()
        self._ended: Ended | None = None
        self._over = threading.Event()  # set after `_ended`
        self._key: LocalKey | None = None
        self._not_written = ""
        # The kernel kills the child with the thread that starts it: one of Ray's might end at any time.
        threading.Thread(target=self._keep, name="keeper", daemon=True).start()

    def news(self, offset: int) -> str:
        """Return `News` as JSON once there are any; offset -1: at once."""
        until_s = time.monotonic() + (NEWS_S if offset >= 0 else 0.0)
        offset = max(offset, self._begin)
        while True:
            ended = self._ended  # read first: then the log is complete
            output = _read(self._log, offset)
            request = self._key.due() if self._key is not None and ended is None else ""
            if output or request or ended is not None or time.monotonic() >= until_s:
                break
            self._over.wait(OUTPUT_LOOK_S)
        news = News(self._node, output.decode(errors="replace"), offset + len(output), request=request)
        if request:
            news = news._replace(host=self._host())
        if ended is not None and len(output) < OUTPUT_BYTES_MAX:
            news = news._replace(exit_code=ended.exit_code, reason=ended.reason)
        return json.dumps(news._asdict())

    def take_certificate(self, answer: str) -> None:
        """Store the answer to a request; if that fails, the certificate is requested again."""
        assert self._key is not None
        try:
            self._key.take(json.loads(answer))
        except ConfigurationError as error:  # such as a full disk
            self._not_written = str(error)

    def ask_to_end(self) -> None:
        """Send SIGTERM to the child, now or once it has started, and once: a second one would kill it."""
        self._asked.set()

    def leave(self) -> None:
        """End this process, and its child with it: where Ray's head is gone, `ray.kill` does nothing."""
        os._exit(0)

    def _keep(self) -> None:
        try:
            self._ended = self._run()
        except (OSError, ParashardError) as error:
            code = exit_code_of(error) if isinstance(error, ParashardError) else ExitCode.IO_ERROR
            self._ended = Ended(self._spec.name, code, f"on the node {self._address} of Ray: {error}", 1)
        except Exception as error:  # noqa: BLE001  # without an end the process would count as placed
            traceback.print_exc()  # into Ray's log of this actor
            why = f"on the node {self._address} of Ray: {type(error).__name__}: {error}"
            self._ended = Ended(self._spec.name, ExitCode.FAILED, why, 1)
        self._over.set()

    def _run(self) -> Ended:
        """Start the child, and wait for its end; ParashardError if this node does not have the launcher's store."""
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # which the child inherits, and Ray may have set
        spec, cluster = self._spec, self._cluster
        _check_store(spec)
        cluster.variables = {spec.module: spec.variables}
        cluster.script = ScriptCommand((sys.executable, *self._script), os.getcwd()) if self._script else None
        words = replaced(spec.words, "--host", spec.host or self._address)
        if spec.identity:
            words = replaced(words, "--tls-dir", str(self._certified()))
        shared = str(coordinator_in(Path(spec.run_dir)).get("address"))
        if spec.script and shared in words:  # this node has the run's folder, with the results of the script's calls
            words = replaced(words, "--connect", spec.run_dir)
        cluster.start(spec.name, spec.module, words)
        is_told = False
        while not (ended := cluster.reap()):
            if self._asked.is_set() and not is_told:
                is_told = True
                cluster.ask_to_end(spec.name)
            time.sleep(LOOK_S)
        return ended[0]

    def _host(self) -> str:
        with suppress(ParashardError):
            return own_host(self._spec.host or self._address)
        return ""

    def _certified(self) -> Path:
        """Create a key on this node, wait until the launcher has signed its certificate, and return their folder."""
        from parashard.security.signing import ANSWER_S, LocalKey  # here: slow to import

        self._key = LocalKey(self_removing_folder() / "tls", identities_in([self._spec.identity]))
        if not self._key.wait(ANSWER_S):
            raise Unreachable(
                self._not_written or f"no answer to its request for a certificate within {ANSWER_S:.0f} s"
            )
        return self._key.folder


def replaced(words: list[str], flag: str, value: str) -> list[str]:
    """Return the words of a command with another value of a flag, if they have the flag."""
    return [value if before == flag else word for before, word in zip(["", *words], words, strict=False)]


def _check_store(spec: ProcessSpec) -> None:
    """Raise if this node does not see the launcher's probe in the store."""
    try:
        open_store(spec.store).read(spec.probe, PROBE_BYTES_MAX)
    except NotStored as error:
        raise ConfigurationError(f"{error}: {spec.advice}") from None


def _read(log: Path, offset: int) -> bytes:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read(OUTPUT_BYTES_MAX)


def _log_folder() -> Path:
    """Return the folder of Ray's logs on this node, that of this process's standard error; else a temporary folder."""
    own = Path(os.readlink("/proc/self/fd/2"))
    return own.parent if own.is_file() else Path(tempfile.gettempdir())
