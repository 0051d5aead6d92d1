"""Hosts: machines of one test, each in namespaces of its own, on one switch.

A host has its own network, processes, name, boot ID, /proc and /dev/shm; the disk is shared, as by NFS. Nothing of it
has a name outside: process 1 of a host ends with the pipe that it reads, and the kernel ends all else with it, so that
nothing is left even of a test that was killed. Names of hosts are found by /etc/hosts, which all of them share. Needs
root, and Linux with TAP devices.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

from switch import SOUND, TUN, Line, Port, Switch

NETWORK = "10.98.0"  # in namespaces: it clashes with nothing of this machine's
PROGRAMS = ("ip", "unshare", "nsenter", "mount")
CLONE_NEWNET = 0x40000000  # linux/sched.h
DEADLINE_S = 10.0  # for a host to come up
POLL_S = 0.01


def unavailable_reason() -> str:
    """Return why there can be no hosts on this machine; "" where there can."""
    if os.geteuid() != 0:
        return "namespaces of a network need root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages iproute2, util-linux)"
    if not Path(TUN).exists():
        return f"there is no {TUN}"
    made = subprocess.run(["unshare", "--net", "--pid", "--mount", "--fork", "true"], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"no namespaces here: {made.stderr.decode().strip()}"


class Host:
    """One machine. Made by `Hosts`."""

    def __init__(self, name: str, number: int, port: Port, names_file: Path) -> None:
        self.name = name
        self.number = number
        self.port = port
        self.address = f"{NETWORK}.{number}"
        self.is_off = False
        """Its power is gone: nothing may be started in it."""
        self._entered: list[subprocess.Popen[bytes]] = []
        boot_id = names_file.with_name(f"boot-id-{name}")
        boot_id.write_text(f"{uuid.uuid4()}\n")
        boot = (
            f"mount -t tmpfs tmpfs /dev/shm && hostname {name} && ip link set lo up"
            f" && mount --bind {shlex.quote(str(names_file))} /etc/hosts"
            f" && mount --bind {shlex.quote(str(boot_id))} /proc/sys/kernel/random/boot_id"
            " && echo up && exec cat >/dev/null"
        )
        namespaces = ("--mount", "--mount-proc", "--net", "--uts", "--ipc", "--pid")
        self._holder = subprocess.Popen(
            ["unshare", *namespaces, "--fork", "--kill-child=KILL", "sh", "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline()
        self.first_pid = next(_children_of(self._holder.pid), 0)
        if said != b"up\n" or not self.first_pid:
            raise OSError(f"host {name} has not come up")
        _run("ip", "link", "set", port.device, "netns", str(self.first_pid), "name", "eth0", "address", _text(port.mac))
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs a command inside."""
        spaces = ("--mount", "--net", "--uts", "--ipc", "--pid")
        return ["nsenter", f"--target={self.first_pid}", *spaces, "--", *command]

    def run(self, *command: str) -> None:
        """Run a command inside, and wait for it."""
        _run(*self.enter(command))

    def start(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a program inside; its exit code is that of the process that is returned."""
        process = subprocess.Popen(
            self.enter(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        self._entered = [other for other in self._entered if other.returncode is None]
        self._entered.append(process)
        return process

    def within(self, ask: Callable[[], Any]) -> Any:
        """Return what a function finds on a thread of its own that is in this host's network."""
        found: Future[Any] = Future()

        def there() -> None:
            try:
                with open(f"/proc/{self.first_pid}/ns/net") as space:
                    if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
                found.set_result(ask())
            except BaseException as error:  # noqa: BLE001  # the caller gets it
                found.set_exception(error)

        threading.Thread(target=there, name=f"in-{self.name}", daemon=True).start()
        return found.result()

    def pids(self) -> list[int]:
        """Return the processes inside, but for the first; numbers are those of this machine."""
        space = os.readlink(f"/proc/{self.first_pid}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.first_pid:
                with suppress(OSError):
                    if os.readlink(entry / "ns" / "pid") == space:
                        found.append(int(entry.name))
        return found

    def signal_all(self, number: int) -> None:
        """Send a signal to every process inside."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self) -> None:
        """Stop every process; the kernel goes on, and acknowledges what it receives."""
        self.signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self.signal_all(signal.SIGCONT)
        for process in self._entered:  # nsenter stops with the process that it waits for
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)

    def lines(self, outgoing: Line | None, incoming: Line | None) -> None:
        """Set what happens to what it sends and receives; None: as it is."""
        self.port.outgoing = self.port.outgoing if outgoing is None else outgoing
        self.port.incoming = self.port.incoming if incoming is None else incoming

    def heal_lines(self) -> None:
        """Let its lines be sound."""
        self.lines(SOUND, SOUND)

    def power_off(self) -> None:
        """End every process, and let none of them say goodbye: the line is cut first."""
        self.is_off = True
        cut = replace(SOUND, cut=True)
        self.lines(cut, cut)
        self.signal_all(signal.SIGKILL)
        end_s = time.monotonic() + DEADLINE_S
        while any(process.poll() is None for process in self._entered) and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def power_on(self) -> None:
        """Let it be used again, with an empty /dev/shm; whoever started its processes starts them again."""
        self.run("find", "/dev/shm", "-mindepth", "1", "-delete")
        self.heal_lines()
        self.is_off = False

    def end(self) -> None:
        """End every process and the namespaces."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        self._holder.kill()
        self._holder.wait()
        for process in self._entered:
            process.kill()
            process.wait()


class Hosts:
    """Hosts by name, and their switch. A context manager: its exit leaves nothing."""

    def __init__(self, names: Sequence[str], folder: Path, *, seed: int = 0) -> None:
        self._names = names
        self._names_file = folder / "hosts"
        self._moved = 0
        self._stack = ExitStack()
        self.switch = Switch(seed)
        self.by_name: dict[str, Host] = {}

    def __enter__(self) -> Self:
        self._names_file.write_text("")
        self._stack.enter_context(self.switch)
        try:
            for number, name in enumerate(self._names, 1):
                self.by_name[name] = Host(name, number, self.switch.plug(), self._names_file)
                self._stack.callback(self.by_name[name].end)
            self.switch.start()
            self._publish()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def move(self, name: str) -> None:
        """Give a host another address; its name leads there at once, and the earlier address to nothing."""
        host = self.by_name[name]
        self._moved += 1
        earlier, host.address = host.address, f"{NETWORK}.{100 + self._moved}"
        host.run("ip", "addr", "del", f"{earlier}/24", "dev", "eth0")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        self._publish()

    def take_address(self, thief: str, owner: str) -> None:
        """Let a host have another's address, too, and everyone hear of it."""
        address = self.by_name[owner].address
        self.by_name[thief].run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        self.switch.announce(self.by_name[thief].port, socket.inet_aton(address))

    def give_address_back(self, thief: str, owner: str) -> None:
        """Let the address be its owner's alone."""
        address = self.by_name[owner].address
        self.by_name[thief].run("ip", "addr", "del", f"{address}/24", "dev", "eth0")
        self.switch.announce(self.by_name[owner].port, socket.inet_aton(address))

    def _publish(self) -> None:
        """Write the hosts' names in place: each host has this very file as its /etc/hosts."""
        named = [f"{host.address} {host.name}" for host in self.by_name.values()]
        self._names_file.write_text("\n".join(["127.0.0.1 localhost", *named, ""]))


def _children_of(parent: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == parent:
                    yield int(entry.name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _text(mac: bytes) -> str:
    return ":".join(f"{byte:02x}" for byte in mac)
