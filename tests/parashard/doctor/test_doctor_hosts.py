"""Hosts that are asked by a stand-in for ssh: what they say, how they are paired, and that nothing stays behind."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.cli.doctor import asked_for
from parashard.doctor.answering import Answers, answer_lines
from parashard.doctor.findings import Severity, in_order, of_network
from parashard.doctor.hosts import HERE, LOOK_S, Asked, Remote, listens_on, look_at, rounds
from parashard.errors import ConfigurationError, Unavailable, Unreachable
from parashard.job.sections import ClusterOptions
from parashard.launch.host_file import NamedHost
from parashard.launch.run_folders import RUNS
from parashard.process.addresses import WILDCARDS, split_address
from parashard.process.shell import ExitCode
from support.command_line import assert_refused, run_command
from support.small_job import SMALL_JOB

SSH = """#!/bin/sh
# Stands for ssh: node1 is this machine at 127.0.0.11, and so on.
for word; do host=$command; command=$word; done
case $host in node[1-9]) ;; *) echo "ssh: Could not resolve hostname $host" >&2; exit 255 ;; esac
echo "a login shell says something"
SSH_CONNECTION="127.0.0.1 5000 127.0.0.1${host#node} 22" exec sh -c "$command"
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for ssh before the real one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def named(*names: str) -> list[NamedHost]:
    return [NamedHost(name, sys.executable) for name in names]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_every_pair_meets_once_and_nobody_twice_at_a_time(count):
    names = [f"node{number}" for number in range(count)]
    found = rounds(names)
    for at_once in found:
        together = [name for pair in at_once for name in pair]
        assert len(together) == len(set(together))
    met = [frozenset(pair) for at_once in found for pair in at_once]
    assert sorted(map(sorted, met)) == sorted(map(sorted, itertools.combinations(names, 2)))


@pytest.mark.usefixtures("ssh")
def test_every_two_hosts_measure_both_ways_and_a_lost_one_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "127.0.0.1 5000 127.0.0.19 22")  # who calls it came by ssh
    store = tmp_path / "store"
    said: list[str] = []
    network = look_at(named("node1", "node2", "lost"), Asked("127.0.0.1", store=str(store)), said.append)
    assert [host.name for host in network.hosts] == [HERE, "node1", "node2", "lost"]
    assert split_address(network.hosts[0].listens_at)[0] in WILDCARDS
    assert network.hosts[1].listens_at.startswith("127.0.0.11:")
    assert network.hosts[3].problem == "ssh: Could not resolve hostname lost"
    assert all(host.clock is not None and abs(host.clock.ahead_s) < 1 for host in network.hosts[1:3])
    names = (HERE, "node1", "node2")
    kinds = {(one, to): network.links[one][to].kind for one, to in itertools.permutations(names, 2)}
    assert set(kinds.values()) == {"open"}, network.links
    problems = [(one.where, one.text) for one in in_order(of_network(network)) if one.severity is Severity.PROBLEM]
    assert [where for where, _ in problems] == ["lost"], problems
    assert said == [
        "asking 3 hosts by ssh",
        "measuring 6 directions, about 3 s",
        f"asking the store {store}, at most 6 min 0 s",
    ]
    assert list(store.rglob("*")) in ([], [store / "doctor"]), "probe files are deleted"


@pytest.mark.usefixtures("ssh")
def test_hosts_whose_stores_are_not_one_are_told(tmp_path, monkeypatch):
    """A relative folder is another one for each host that starts elsewhere."""
    away = tmp_path / "away"
    away.mkdir()
    shim = tmp_path / "bin" / "ssh"
    shim.write_text(shim.read_text().replace("exec sh", f"cd {away}; exec sh"))
    monkeypatch.chdir(tmp_path)
    network = look_at(named("node1"), Asked(store="store"))
    assert [host.unseen for host in network.hosts] == [("node1",), (HERE,)]


STORELESS = """#!/bin/sh
exec {python} -P -c '
import os, threading
from parashard.doctor import answering, machine
machine.{name} = lambda *_: {does}
answering.main()'
"""


WITHOUT_STORE = {
    "node1": ("shared", "threading.Event().wait()", "the store {store} did not answer in 2 s; "),
    "node2": ("unseen", "threading.Event().wait()", "the store {store} did not answer in 2 s; "),
    "node3": ("shared", "os._exit(1)", "it was lost while it asked the store {store}: "),
}


@pytest.mark.usefixtures("ssh")
def test_a_store_that_does_not_answer_is_told_as_that_and_all_else_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("parashard.doctor.hosts.STORE_S", 2.0)
    monkeypatch.setattr("parashard.doctor.hosts.CLOSE_S", 0.5)
    for host, (name, does, _) in WITHOUT_STORE.items():
        (tmp_path / host).write_text(STORELESS.format(python=sys.executable, name=name, does=does))
        (tmp_path / host).chmod(stat.S_IRWXU)
    hosts = [NamedHost(host, str(tmp_path / host)) for host in WITHOUT_STORE]
    network = look_at(hosts, Asked(store=str(tmp_path / "store")))
    names = (HERE, *WITHOUT_STORE)
    assert {network.links[one][to].kind for one, to in itertools.permutations(names, 2)} == {"open"}
    problems = {one.where: one.text for one in of_network(network) if one.severity is Severity.PROBLEM}
    assert problems.keys() == WITHOUT_STORE.keys()
    for host, (_, _, text) in WITHOUT_STORE.items():
        assert problems[host].startswith(text.format(store=tmp_path / "store"))


def test_ctrl_c_does_not_wait_for_hosts_that_are_silent(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text(f"#!/bin/sh\nread -r question; kill -INT {os.getpid()}; exec sleep 600\n")
    (tmp_path / "ssh").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    begun_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        look_at(named("node1"), Asked("127.0.0.1"))
    assert time.monotonic() - begun_s < LOOK_S / 2, "and no thread waits for the answer"


def test_a_host_that_says_anything_but_an_answer_is_heard_until_the_deadline():
    remote = Remote("node1", ["yes", "no JSON"])
    with pytest.raises(Unreachable, match="no answer in time"):
        remote.ask(0.2, do="clock")
    remote.wait(0.0)


@pytest.mark.parametrize(
    ("host", "here", "there"),
    [
        ("", "::", ""),
        ("127.0.0.1", "::", ""),
        ("10.0.0.7", "10.0.0.7", ""),
        ("0.0.0.0", "0.0.0.0", ""),
        ("auto", "auto", "auto"),
        ("interface:lo", "::", "interface:lo"),
        ("interface:none9", "interface:none9", "interface:none9"),
    ],
)
def test_an_address_of_a_job_is_that_of_this_machine(monkeypatch, host, here, there):
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.0.0.7")
    monkeypatch.setattr("socket.has_dualstack_ipv6", lambda: True)
    assert listens_on(host, here=True) == here
    assert listens_on(host, here=False) == there


@pytest.mark.usefixtures("ssh")
def test_without_ssh_or_a_process_it_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigurationError, match="there is no program ssh on this machine"):
        look_at(named("node1"), Asked())

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("subprocess.Popen", refused)
    with pytest.raises(Unavailable, match="cannot be started: Too many open files"):
        look_at(named("node1"), Asked())


@pytest.mark.usefixtures("ssh")
def test_measuring_has_an_end(monkeypatch):
    monkeypatch.setattr("parashard.doctor.hosts.MEASURE_S", -1.0)
    said: list[str] = []
    assert look_at(named("node1"), Asked(), said.append).links == {}
    assert said[-1].endswith("2 directions are not measured")


def test_the_answering_side_ends_with_its_input_and_survives_what_is_no_question(tmp_path):
    lines = [b"nonsense", b"[]", b'{"do": "dance"}', b'{"do": "clock"}', b'{"do": "look"}']
    read, write = os.pipe()
    os.write(write, b"\n".join(lines) + b"\n")
    os.close(write)
    said: list[bytes] = []
    with open(read, "rb") as source:
        answer_lines(source, said.append, {})
    answers = [json.loads(line) for line in said]
    assert [sorted(answer) for answer in answers] == [["problem"], ["problem"], ["problem"], ["wall_s"], ["problem"]]


def test_a_host_listens_where_ssh_came_to_where_the_job_says_loopback():
    answers = Answers({"SSH_CONNECTION": "127.0.0.1 5000 127.0.0.12 22"})
    asked = {"do": "look", "token": "00" * 32, "host": "127.0.0.1", "ports": ["0"]}
    found = answers.answer(asked)
    answers.close()
    assert found["listens_at"].startswith("127.0.0.12:")
    assert found["client"] == "127.0.0.1"
    other = Answers({})
    assert "there are: " in other.answer(asked | {"host": "interface:none9"})["listen_problem"]
    other.close()


def test_every_port_is_tried_and_the_first_answers():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answers = Answers({})
        found = answers.answer({"do": "look", "token": "00" * 32, "host": "127.0.0.1", "ports": ["0", str(port)]})
        answers.close()
    assert split_address(found["listens_at"])[1] != port
    assert f"127.0.0.1:{port}" in found["listen_problem"]


@pytest.mark.parametrize(("needed", "problem"), [(1, None), (2, "no port of {range} is free; of the last: ")])
def test_of_a_range_as_many_ports_have_to_be_free_as_the_job_needs(needed, problem):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    answers, of_one = Answers({}), f"{port}-{port}"
    asked = {"do": "look", "token": "00" * 32, "host": "127.0.0.1", "ports": ["0", *needed * [of_one]]}
    told = answers.answer(asked).get("listen_problem")
    answers.close()
    assert told is None if problem is None else told.startswith(problem.format(range=of_one))


@pytest.mark.parametrize(
    ("port", "launcher", "hosts", "here", "there"),
    [
        (None, "local", 0, "0 0 0 0 0 0", "0 0 0 0"),
        (7000, "local", 0, "7000 7001 7002 7003 7004 7005", "7002 7003 7004 7005"),
        (7000, "ssh:hosts", 0, "7000 7001", "7002 7003 7004 7005"),
        (7000, "local", 2, "7000 7001", "7002 7003 7004 7005"),
        ("7000-7099", "local", 0, "7000 7001" + 4 * " 7002-7099", "7002-7099 7002-7099 7002-7099 7002-7099"),
        ("7000-7099", "local", 2, "7000 7001", "7002-7099 7002-7099"),
        ("7000-7099", "local", 3, "7000 7001", "7002-7099 7002-7099"),
    ],
)
def test_the_coordinators_ports_are_of_this_machine_and_the_shards_of_hosts(port, launcher, hosts, here, there):
    cluster = ClusterOptions(shards=2, workers=3, port=port, launcher=launcher)
    asked = asked_for(cluster, "store", hosts)
    assert [" ".join(map(str, ports)) for ports in (asked.here, asked.there)] == [here, there]


@pytest.mark.parametrize(
    ("url", "hosts", "store"), [("", 0, ""), ("", 2, str(RUNS.absolute())), ("/all", 2, "/all"), ("/all", 0, "/all")]
)
def test_several_hosts_have_to_share_the_folder_of_runs_where_no_store_is_named(url, hosts, store):
    assert asked_for(ClusterOptions(shards=2, workers=3), url, hosts).store == store


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., object]:
    """Return a function that runs `parashard doctor`."""
    return lambda *words: run_command(monkeypatch, capsys, "doctor", *words)


def test_the_command_looks_at_this_machine(doctor, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", io.StringIO().isatty)
    ran = doctor()
    assert ran.exit_code == ExitCode.DONE, ran
    assert ran.out.startswith("parashard   ")
    assert "no problem found" in ran.out or "warning" in ran.out


@pytest.mark.usefixtures("ssh")
def test_the_command_exits_with_1_where_a_job_would_not_work(doctor, tmp_path):
    (tmp_path / "hosts").write_text("node1\nlost\n")
    ran = doctor(str(tmp_path / "hosts"), "--json")
    assert ran.exit_code == ExitCode.FAILED
    found = json.loads(ran.out)
    assert found["measured"]["hosts"][1]["machine"]["cores"] >= 1
    assert [one["where"] for one in found["findings"] if one["severity"] == "problem"] == ["lost"]


@pytest.mark.parametrize("what", ["", "nowhere", "::1:7000", "host:0"])
def test_what_is_neither_a_file_nor_a_run_nor_an_address_is_refused(doctor, what):
    assert_refused(doctor(what), f"'{what}' is neither a file of hosts nor a run, and ", "is not HOST:PORT")


def test_a_taken_port_of_the_coordinator_is_a_problem_though_the_range_has_free_ones(doctor, tmp_path):
    (tmp_path / "small.toml").write_text(SMALL_JOB)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = doctor("--job", str(tmp_path / "small.toml"), "--set", f"cluster.port={port}-{port + 60}", "--json")
    assert ran.exit_code == ExitCode.FAILED
    assert any(f"127.0.0.1:{port}" in one["text"] for one in json.loads(ran.out)["findings"])


def test_a_job_file_is_no_file_of_hosts(doctor, tmp_path):
    (tmp_path / "small.toml").write_text(SMALL_JOB)
    job = str(tmp_path / "small.toml")
    assert_refused(doctor(job), f"found {job}, a job file; allowed: --job {job}")


@pytest.mark.parametrize("hosts", [[], ["hosts"]])
def test_certificates_are_only_for_something_that_runs(doctor, tmp_path, monkeypatch, hosts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("node1\n")
    assert_refused(doctor(*hosts, "--tls-dir", "nosuch"), "found --tls-dir; allowed only with ADDR or RUN")


def test_a_job_is_taken_with_other_values_of_its_keys(doctor, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(SMALL_JOB)
    ran = doctor("--job", str(job), "--set", "cluster.host=127.0.0.12", "--json")
    assert json.loads(ran.out)["measured"]["hosts"][0]["listens_at"].startswith("127.0.0.12:")
    assert_refused(doctor("--job", str(job), "--set", "checkpoint.ulr=x"), "checkpoint.ulr")
    assert_refused(doctor("--set", "checkpoint.url=x"), "--set", "no --job")
