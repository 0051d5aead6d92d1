"""A job on five hosts inside TLS under faults of hosts; that the hosts' faults are real; that nothing of them stays."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host_campaign import MATRIX, run_row
from host_faults import KINDS, Fault, draw
from hosted_job import HOSTS, PORT
from network_hosts import Host, Hosts
from switch import Line

from parashard.process.shell import ExitCode
from support.waiting import eventually

FOLDER = str(Path(__file__).parent)
ECHO = f"""
import socket
listening = socket.create_server(("", {PORT}))
while True:
    connection = listening.accept()[0]
    while text := connection.recv(100000):
        connection.sendall(text)
"""
LINE = 200  # bytes that fit into small frames
BRIEF_S = 0.5

full = pytest.mark.full("root, namespaces, and a minute; the simulation loses and delays messages in virtual time")


def test_a_schedule_follows_from_its_seed_and_begins_with_every_kind() -> None:
    schedule = draw(3, 40, HOSTS)
    assert schedule == draw(3, 40, HOSTS)
    assert schedule != draw(4, 40, HOSTS)
    assert {fault.kind for fault in schedule[: len(KINDS)]} == set(KINDS)
    assert {fault.host for fault in schedule} == set(HOSTS)
    assert all(fault.host != fault.other for fault in schedule)


def asked(client: Host, server: Host, size: int = LINE, timeout_s: float = BRIEF_S) -> Callable[[], float | str]:
    """Return a function that sends bytes and waits for them to come back: after how long, or the error's name."""

    def ask() -> Any:
        begun_s = time.monotonic()
        try:
            with socket.create_connection((server.address, PORT), timeout_s) as connection:
                connection.sendall(bytes(size))
                left = size
                while left:
                    left -= len(connection.recv(left))
        except OSError as error:
            return type(error).__name__
        return time.monotonic() - begun_s

    return lambda: client.within(ask)


@full
def test_each_fault_of_a_line_is_one_and_is_over_when_it_is_healed(hosts_possible: None, tmp_path: Path) -> None:
    with Hosts(["one", "two"], tmp_path) as hosts, (tmp_path / "log").open("wb") as log:
        one, two = hosts.by_name.values()
        two.start([sys.executable, "-c", ECHO], log)

        def sound() -> bool:
            return isinstance(asked(one, two)(), float)

        eventually(sound, "the hosts reach each other")
        for lines in ((Line(cut=True), None), (None, Line(cut=True)), (Line(loss=1.0), None)):
            two.lines(*lines)
            assert asked(one, two)() == "TimeoutError", lines
            two.heal_lines()
            eventually(sound, "the line is sound again")
        two.lines(Line(delay_s=0.05), Line(delay_s=0.05))
        assert asked(one, two, timeout_s=10.0)() >= 0.2  # there and back, to connect and for the bytes
        two.lines(Line(frame_bytes_max=590), Line(frame_bytes_max=590))
        assert isinstance(asked(one, two)(), float)
        assert asked(one, two, size=5000)() == "TimeoutError"
        two.heal_lines()
        two.freeze()
        assert asked(one, two)() == "TimeoutError"  # the kernel takes the connection, nobody answers
        two.thaw()
        eventually(sound, "the host goes on")
        hosts.take_address("one", "two")
        assert asked(one, two)() == "ConnectionRefusedError"
        hosts.give_address_back("one", "two")
        eventually(sound, "the address is its owner's again")
        two.power_off()
        assert asked(one, two)() == "TimeoutError"
        two.power_on()
        assert asked(one, two)() == "ConnectionRefusedError"


HOLDER = f"""
import sys
sys.path[:0] = [{FOLDER!r}, {str(Path(FOLDER).parent)!r}]
from pathlib import Path
from network_hosts import Hosts
folder = Path(sys.argv[1])
with Hosts(["one", "two"], folder) as hosts, (folder / "log").open("wb") as log:
    hosts.by_name["two"].start(["sleep", "600"], log)
    while not hosts.by_name["two"].pids():
        pass
    print(*hosts.by_name["two"].pids(), *(host.first_pid for host in hosts.by_name.values()), flush=True)
    sys.stdin.read()
"""


@full
def test_nothing_is_left_of_hosts_whose_test_was_killed(
    hosts_possible: None, popen: Callable[..., Any], tmp_path: Path
) -> None:
    program = popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) == 3
    program.send_signal(signal.SIGKILL)

    def alive() -> list[int]:
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    eventually(lambda: not alive(), "every process has ended", told=alive)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert not [name for _, name in socket.if_nameindex() if name.startswith("parashard")]


@full
@pytest.mark.timeout(600)
def test_a_job_on_five_hosts_survives_their_faults(hosts_possible: None, tmp_path: Path) -> None:  # P1-P14
    schedule = [
        Fault("another address", "coordinator", "worker-2", 1.0, 0.5),
        Fault("power lost", "worker-2", "worker-3", 1.0, 0.5),
    ]
    outcome = run_row(MATRIX[0], schedule, seed=1, folder=tmp_path / "job")
    assert outcome.broken == [], f"{outcome}; see {tmp_path}"
    assert outcome.faults == len(schedule)
    assert (outcome.exits[-9], outcome.exits[ExitCode.RETRY]) == (1, 1), "worker-2, and the coordinator, which moved"
