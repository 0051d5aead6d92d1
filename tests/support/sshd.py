"""Sshd: a real OpenSSH server for a test, on this machine, to which every host name leads, or on hosts of the test.

Skips the test, loudly, where there is none (`.ci/packages` installs it). What runs behind it is found by a variable in
its environment.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.waiting import eventually

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
MARK = "PARASHARD_TESTED_BY"
CONFIG = """\
ListenAddress {listens_at}:{port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/id.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
MaxStartups 100:30:200
SetEnv {mark}={folder} TMPDIR={folder}/tmp {variables}
"""
CLIENT = """\
Host *
  HostName {leads_to}
  Port {port}
  User {user}
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
  HostKeyAlias here
  LogLevel ERROR
"""


class Sshd:
    """A server with keys of its own. `bin_` has an `ssh` that knows it, for the front of PATH.

    Parameters
    ----------
    folder : Path
        For its keys, settings and log, and for the temporary files of what runs behind it.
    elsewhere : bool
        Whether it is the test that runs `command`, on hosts with addresses of their own, to which their names lead.
    variables : str
        Of the environment behind it.
    """

    def __init__(self, folder: Path, *, elsewhere: bool = False, **variables: str) -> None:
        if SSHD is None or shutil.which("ssh") is None:
            pytest.skip("needs openssh-server and openssh-client: hosts by ssh are NOT CHECKED")
        self.folder, self.bin_, self.tmp = folder, folder / "bin", folder / "tmp"
        self.command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
        self._server: subprocess.Popen[bytes] | None = None
        for name in ("id", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        public = " ".join((folder / "host_key.pub").read_text().split()[:2])
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        said = " ".join(f"{name}={value}" for name, value in variables.items())
        filled = {"folder": folder, "port": port, "user": getpass.getuser(), "mark": MARK, "variables": said}
        filled["listens_at"], filled["leads_to"] = ("0.0.0.0", "%h") if elsewhere else ("127.0.0.1", "127.0.0.1")
        (folder / "known_hosts").write_text(f"here {public}\n")
        (folder / "sshd_config").write_text(CONFIG.format(**filled))
        (folder / "config").write_text(CLIENT.format(**filled))
        self.bin_.mkdir()
        self.tmp.mkdir()
        (self.bin_ / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        (self.bin_ / "ssh").chmod(0o700)
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where it drops its rights
        if not elsewhere:
            with (folder / "sshd.log").open("w") as log:
                self._server = subprocess.Popen(self.command, stderr=log)
            eventually(self._answers, "sshd answers", told=(folder / "sshd.log").read_text)

    def processes(self) -> dict[int, list[str]]:
        """Return the processes behind the server by id, each with its command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and f"{MARK}={self.folder}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        return found

    def pids(self, word: str) -> list[int]:
        """Return the ids of the processes behind it that have a word in their command line."""
        return sorted(pid for pid, words in self.processes().items() if word in words)

    def keepers(self) -> list[int]:
        """Return the ids of the keepers, one for each host that is connected to."""
        return self.pids("parashard.launch.keeper")

    def hosts(self, *lines: str) -> Path:
        """Write a host file."""
        file = self.folder / "hosts"
        file.write_text("\n".join(lines) + "\n")
        return file

    def left(self) -> list[object]:
        """Return what is behind it still: command lines, and temporary files."""
        return [*self.processes().values(), *self.tmp.iterdir()]

    def stop(self) -> None:
        """End the server and whatever is behind it, but for the shells that remove what keepers had."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        for pid, words in self.processes().items():
            if words[0] != "/bin/sh":
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _answers(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, (self.folder / "sshd.log").read_text()
        return subprocess.run([self.bin_ / "ssh", "any", "true"], check=False, capture_output=True).returncode == 0


@contextmanager
def sshd_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[Sshd]:
    """Yield a server to which `ssh` of this process leads; afterwards nothing is left behind it."""
    server = Sshd(folder, **variables)
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(server.bin_), str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    yield server
    try:
        eventually(lambda: not server.left(), "nothing is left on the hosts", told=server.left)
    finally:
        server.stop()
