"""Findings: a pure function of what was measured; each is one sentence with what to do."""

from __future__ import annotations

import pytest

from parashard import __version__
from parashard.doctor.facts import Certificate, Clock, Host, Link, Machine, Network, Service, Shared
from parashard.doctor.findings import Finding, Severity, in_order, of_network, of_service
from parashard.doctor.report import of_findings, of_hosts, of_links, summary
from parashard.doctor.report import of_service as shown_service

GIB = 1 << 30
SOUND = Machine(
    version=__version__,
    python="3.11.7",
    libraries={"numpy": "2.4.6", "grpcio": "1.85.1"},
    kernel="Linux 6.1",
    architecture="x86_64",
    cores=8,
    load=1.0,
    memory_bytes=32 * GIB,
    memory_free_bytes=20 * GIB,
    shm_problem="",
    shm_free_bytes=16 * GIB,
    descriptors=65536,
    descriptors_most=65536,
    gpus=(),
    gpu_problem="",
    proxies=(),
    own_name="node1",
    own_address="10.0.0.1",
    addresses=(("eth0", "10.0.0.1"),),
    clock_set=True,
)
FAST = 1.2e9  # bytes a second


def link(**changes: object) -> Link:
    return Link(address="10.0.0.2:7000", kind="open", round_trip_s=1e-4, bytes_per_s=FAST).replaced(**changes)


def network(machine: Machine = SOUND, there: Link | None = None, back: Link | None = None, **host: object) -> Network:
    """Return this machine and node2, and the links from here and back."""
    hosts = (Host(name="this machine", machine=SOUND), Host(name="node2", machine=machine).replaced(**host))
    return Network(
        hosts=hosts, links={"this machine": {"node2": there or link()}, "node2": {"this machine": back or link()}}
    )


def test_nothing_is_found_where_all_is_well():
    assert in_order(of_network(network())) == []
    assert summary([]) == "no problem found"


MACHINES = [
    ({"memory_free_bytes": GIB // 2}, Severity.WARNING, "0.5 GiB of memory are free of 32.0; end what fills it"),
    (
        {"shm_problem": "/dev/shm is full"},
        Severity.WARNING,
        "/dev/shm is full, so that workers reach shards beside them",
    ),
    (
        {"descriptors": 256},
        Severity.WARNING,
        "a process may have 256 open files, and a shard needs one for each "
        "connection; raise the limit by `ulimit -n 65536` before the start",
    ),
    ({"descriptors": 256, "descriptors_most": 256}, Severity.WARNING, "raise the hard limit (LimitNOFILE= of systemd"),
    ({"gpus": ("L4",), "gpu_problem": "a CUDA device needs CuPy."}, Severity.WARNING, "1 GPU cannot be computed on: a"),
    ({"load": 30.0}, Severity.NOTE, "more processes run than there are cores, so that links are quicker"),
    ({"clock_set": False}, Severity.NOTE, "nothing keeps the clock right; start an NTP client"),
    ({"proxies": ("http_proxy",)}, Severity.NOTE, "http_proxy is set: processes of a job ignore it among themselves"),
    (
        {"own_address": "127.0.1.1"},
        Severity.NOTE,
        "its own name node1 stands for 127.0.1.1, which nobody else reaches; use cluster.interface",
    ),
    (
        {"store": Shared(url="s3://b/x", problem="no such bucket.")},
        Severity.PROBLEM,
        "the store s3://b/x cannot be written: no such bucket; give this host the rights",
    ),
    (
        {"store": Shared(url="s3://b/x", no_answer="the store s3://b/x did not answer in 180 s")},
        Severity.PROBLEM,
        "the store s3://b/x did not answer in 180 s; look at the network",
    ),
    (
        {"store": Shared(url="/nfs/x", write_s=3.0)},
        Severity.WARNING,
        "writing 20 bytes to the store /nfs/x takes 3.0 s",
    ),
    ({"version": "9.9"}, Severity.PROBLEM, f"it has parashard 9.9 and this machine {__version__}; install one version"),
    (
        {"python": "3.13.1"},
        Severity.WARNING,
        "it has Python 3.13.1 instead of 3.11.7, which may change bits of results",
    ),
    ({"libraries": {"numpy": "2.0.0"}}, Severity.WARNING, "it has numpy 2.0.0 instead of 2.4.6"),
]


@pytest.mark.parametrize(("changes", "severity", "text"), MACHINES)
def test_what_is_wrong_with_a_machine_is_one_sentence_with_what_to_do(changes, severity, text):
    found = in_order(of_network(network(SOUND.replaced(**changes))))
    assert [(one.severity, one.where) for one in found] == [(severity, "node2")]
    assert text in found[0].text


HOSTS = [
    (
        {"listen_problem": "cannot listen on 10.0.0.2:7002: Address already in use"},
        Severity.PROBLEM,
        "could not listen",
    ),
    (
        {"unseen": ("node3", "node4")},
        Severity.PROBLEM,
        "what node3 and node4 wrote to the store is not there; use an object",
    ),
    ({"clock": Clock(ahead_s=3.2, sure_s=0.1)}, Severity.WARNING, "its clock is 3.2 s ahead of this machine's"),
    ({"clock": Clock(ahead_s=-90.0, sure_s=0.1)}, Severity.WARNING, "its clock is 90 s behind this machine's"),
]


@pytest.mark.parametrize(("changes", "severity", "text"), HOSTS)
def test_what_is_wrong_with_a_host_among_others(changes, severity, text):
    found = in_order(of_network(network(**changes)))
    assert [(one.severity, one.where) for one in found] == [(severity, "node2")]
    assert text in found[0].text


def test_a_clock_that_differs_by_less_than_is_known_is_no_finding():
    assert in_order(of_network(network(clock=Clock(ahead_s=1.5, sure_s=0.6)))) == []


def test_a_host_that_cannot_be_asked_is_told_with_what_to_try():
    lost = Network(hosts=(Host(name="this machine", machine=SOUND), Host(name="node9", problem="Permission denied.")))
    (found,) = in_order(of_network(lost))
    assert (found.severity, found.where) == (Severity.PROBLEM, "node9")
    assert found.text.startswith("it cannot be asked: Permission denied; `ssh -o BatchMode=yes node9 true` must work")
    assert of_hosts(lost)[2].split() == ["node9", "no", "answer"]


LINKS = [
    (
        {"kind": "refused", "problem": "Connection refused"},
        "no connection: Connection refused; the other direction "
        "works; a firewall rejects it, or another machine has this address: allow TCP port 7000, or the range of",
    ),
    (
        {"kind": "silent", "problem": "no answer for 3 s"},
        "a firewall drops it, or there is no route: allow TCP port 7000, or the range of cluster.port, from this",
    ),
    ({"kind": "unknown-name", "problem": "Name or service not known"}, "have this machine resolve the name"),
    ({"kind": "foreign", "problem": "something else answers there"}, "look for a duplicate address"),
    ({"kind": "small-only"}, "short messages pass and long ones do not; the other direction works; an MTU on the way"),
    ({"kind": "failed", "problem": "Network is unreachable"}, "look at the routes and interfaces of this machine"),
]


@pytest.mark.parametrize(("changes", "text"), LINKS)
def test_a_direction_that_does_not_work_names_both_ends_the_port_and_the_advice(changes, text):
    (found,) = in_order(of_network(network(there=link(**changes))))
    assert (found.severity, found.where) == (Severity.PROBLEM, "this machine to node2 at 10.0.0.2:7000")
    assert text in found.text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bytes_per_s": 12e6}, "bytes pass at 96 Mbit/s, and others at 9.6 Gbit/s; look for a better interface"),
        ({"bytes_per_s": 0.2 * FAST}, "bytes pass at 1.9 Gbit/s, and others at 9.6 Gbit/s"),
        ({"round_trip_s": 0.03}, "a round trip takes 30 ms, for which every pull and push waits"),
    ],
)
def test_a_slow_direction_is_a_warning(changes, text):
    (found,) = in_order(of_network(network(there=link(**changes))))
    assert (found.severity, found.where) == (Severity.WARNING, "this machine to node2")
    assert text in found.text


def test_many_slow_directions_are_one_warning():
    names = [f"node{number}" for number in range(3)]
    every = {name: {other: link(bytes_per_s=11e6) for other in names if other != name} for name in names}
    every["node0"]["node1"] = link(bytes_per_s=12e6, round_trip_s=0.02)
    every["node1"]["node0"] = link(bytes_per_s=12e6, round_trip_s=0.03)
    found = in_order(of_network(Network(hosts=tuple(Host(name=name, machine=SOUND) for name in names), links=every)))
    assert [(one.where, one.text.partition(";")[0]) for one in found] == [
        (
            "node0 to node1, node0 to node2, node1 to node0, node1 to node2, node2 to node0 and node2 to node1",
            "bytes pass at 88 Mbit/s to 96 Mbit/s",
        ),
        ("node0 to node1 and node1 to node0", "a round trip takes 20 ms to 30 ms, for which every pull and push waits"),
    ]


def test_what_is_the_same_of_several_hosts_is_said_once_and_the_worst_first():
    found = [Finding(Severity.NOTE, f"node{number}", "so and so") for number in range(8)]
    found.insert(1, Finding(Severity.PROBLEM, "node1", "no power"))
    assert in_order(found) == [
        Finding(Severity.PROBLEM, "node1", "no power"),
        Finding(Severity.NOTE, "node0, node1, node2, node3, node4 and 3 others", "so and so"),
    ]


SERVICE = Service(address="10.0.0.1:7000", looked_up=("10.0.0.1",), links=(link(address="10.0.0.1:7000"),), tls=False)
SERVICES = [
    ({"lookup_problem": "Name or service not known"}, "10.0.0.1", "no such name here"),
    (
        {"links": (link(kind="silent", problem="no answer for 3 s"),)},
        "this machine to 10.0.0.1:7000 at 10.0.0.2:7000",
        "a firewall drops it, or there is no route: allow TCP port 7000",
    ),
    (
        {"links": (link(), link(kind="refused", problem="Connection refused"))},
        "10.0.0.1:7000",
        "its name stands for 10.0.0.2:7000, too, where nothing answers",
    ),
    ({"tls": True}, "10.0.0.1:7000", "it speaks TLS only; give the folder of your certificate by --tls-dir"),
    ({"with_credentials": True}, "10.0.0.1:7000", "it speaks without TLS, and --tls-dir asks for it"),
    (
        {"tls": True, "with_credentials": True, "certificate": Certificate(days_left=0.0, problem="Hostname mismatch")},
        "10.0.0.1:7000",
        "its certificate is not trusted here: Hostname mismatch; issue it for this name",
    ),
    (
        {"tls": True, "with_credentials": True, "certificate": Certificate(days_left=1.0)},
        "10.0.0.1:7000",
        "its certificate expires in 24 h 0 min; renew it",
    ),
    ({"problem": "UNIMPLEMENTED: x"}, "10.0.0.1:7000", "does not answer as parashard: UNIMPLEMENTED: x; is it"),
    ({"version": "9.9"}, "10.0.0.1:7000", f"it is parashard 9.9, and this machine has {__version__}; install one"),
    ({"round_trip_s": 4.0}, "10.0.0.1:7000", "it takes 4.0 s to answer"),
    ({"clock": Clock(ahead_s=-9.0, sure_s=0.5)}, "10.0.0.1:7000", "its clock is 9.0 s behind this machine's"),
    (
        {"others": {"shard-1": link(address="127.0.0.1:4000")}},
        "shard-1",
        "it tells others 127.0.0.1:4000, which only its own machine reaches; set cluster.interface",
    ),
    (
        {"others": {"shard-1": link(kind="silent", problem="no answer for 3 s")}},
        "this machine to shard-1 at 10.0.0.2:7000",
        "a firewall drops it, or there is no route: allow TCP port 7000",
    ),
]


@pytest.mark.parametrize(("changes", "where", "text"), SERVICES)
def test_what_is_wrong_with_something_that_runs(changes, where, text):
    (found,) = in_order(of_service(SERVICE.replaced(**changes)))
    assert found.where == where
    assert text in found.text
    assert shown_service(SERVICE.replaced(**changes))


def test_nothing_is_found_of_a_service_that_is_well():
    assert in_order(of_service(SERVICE.replaced(role="coordinator", version=__version__))) == []


def test_findings_fit_the_terminal_and_are_a_line_each_elsewhere():
    found = [Finding(Severity.PROBLEM, "node1", "word " * 40 + "end"), Finding(Severity.NOTE, "node2", "all right?")]
    lines = [line for _, line in of_findings(found, 60)]
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("problem  node1: word")
    assert lines[1].startswith("         word")
    assert len(of_findings(found, 0)) == 2
    assert of_findings(found, 0)[1][1] == "note     node2: all right?"
    assert summary(found) == "1 problem, 0 warnings"


def test_every_direction_of_a_few_hosts_is_shown_and_of_many_the_slowest():
    assert of_links(network(there=link(kind="silent")))[1].split() == ["this", "machine", "-", "silent"]
    names = [f"node{number}" for number in range(12)]
    hosts = tuple(Host(name=name, machine=SOUND) for name in names)
    every = {name: {other: link() for other in names if other != name} for name in names}
    every["node3"]["node7"] = link(kind="refused")
    lines = of_links(Network(hosts=hosts, links=every))
    assert lines[0].startswith("the slowest 10 of 132 directions")
    assert lines[1].split() == ["node3", "node7", "refused"]
