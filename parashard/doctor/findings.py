"""Judges measurements: each finding is one sentence with a remedy. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from parashard import __version__
from parashard.doctor.facts import Clock, Link, Machine, Network, Service
from parashard.figures import counted, duration, gibibytes
from parashard.process.addresses import is_loopback, split_address

CLOCK_OFF_S = 1.0
DESCRIPTORS_LEAST = 1024
MEMORY_LEAST_BYTES = 1 << 30
SLOW_BYTES_PER_S = 50 << 20
SLOW_SHARE = 0.25
"""A link is slow below this share of the median link, or of the opposite direction."""
SLOW_NAMED_MAX = 3
"""At most this many slow directions get a finding each; more share one."""
FAR_S = 5e-3
BUSY_SHARE = 1.5
SLOW_ANSWER_S = 1.0
STORE_SLOW_S = 1.0
EXPIRES_SOON_DAYS = 3.0
NAMED_MAX = 6
"""Most names in a finding; further ones are counted."""


class Severity(StrEnum):
    """Severity of a finding."""

    PROBLEM = "problem"
    """A job would not work."""
    WARNING = "warning"
    """A job would work, but slower than necessary, or not for long."""
    NOTE = "note"


class Finding(NamedTuple):
    """One sentence with a remedy; it begins with `where`: a host, or the link between two."""

    severity: Severity
    where: str
    text: str


def _problem(where: str, text: str) -> Finding:
    return Finding(Severity.PROBLEM, where, text)


def _warning(where: str, text: str) -> Finding:
    return Finding(Severity.WARNING, where, text)


def _note(where: str, text: str) -> Finding:
    return Finding(Severity.NOTE, where, text)


def in_order(found: Iterable[Finding]) -> list[Finding]:
    """Return findings, the worst first; equal findings of several hosts are merged."""
    places: dict[tuple[Severity, str], list[str]] = {}
    for one in found:
        places.setdefault((one.severity, one.text), []).append(one.where)
    severities = list(Severity)
    grouped = [Finding(severity, _some(where), text) for (severity, text), where in places.items()]
    return sorted(grouped, key=lambda one: severities.index(one.severity))


def of_machine(name: str, machine: Machine, *, alone: bool) -> Iterator[Finding]:
    """Judge one machine; `alone`: the only one, so other machines need not reach it by its name."""
    if machine.memory_free_bytes < MEMORY_LEAST_BYTES:
        yield _warning(
            name,
            f"{gibibytes(machine.memory_free_bytes)} GiB of memory are free of {gibibytes(machine.memory_bytes)}; end "
            "what fills it, or have fewer processes there, before the kernel kills one",
        )
    if machine.shm_problem:
        yield _warning(
            name,
            f"{machine.shm_problem}, so that workers reach shards beside them by TCP; mount a tmpfs there, or free it",
        )
    if machine.descriptors < DESCRIPTORS_LEAST:
        yield _warning(
            name,
            f"a process may have {machine.descriptors} open files, and a shard needs one for each connection; "
            + (
                "raise the limit by `ulimit -n 65536` before the start"
                if machine.descriptors_most > machine.descriptors
                else "raise the hard limit (LimitNOFILE= of systemd, or limits.conf)"
            ),
        )
    if machine.gpu_problem:
        gpus = counted(len(machine.gpus), "GPU")
        yield _warning(name, f"{gpus} cannot be computed on: {machine.gpu_problem.rstrip('.')}")
    if machine.store is not None and machine.store.problem:
        yield _problem(
            name,
            f"the store {machine.store.url} cannot be written: {machine.store.problem.rstrip('.')}; give this host the "
            "rights, the credentials and the packages (parashard[s3]) that it takes",
        )
    elif machine.store is not None and machine.store.no_answer:
        yield _problem(
            name,
            f"{machine.store.no_answer.rstrip('.')}; look at the network and the proxies between them, or use a nearer "
            "or quicker store",
        )
    elif machine.store is not None and machine.store.write_s > STORE_SLOW_S:
        yield _warning(
            name,
            f"writing 20 bytes to the store {machine.store.url} takes {duration(machine.store.write_s)}, and "
            "checkpoints wait for each file; use a nearer or quicker one",
        )
    if machine.load > BUSY_SHARE * machine.cores:
        yield _note(
            name,
            "more processes run than there are cores, so that links are quicker than what is measured; ask again when "
            "it is idle",
        )
    if machine.clock_set is False:
        yield _note(
            name,
            "the kernel says that nothing keeps the clock right; start an NTP client (chrony or systemd-timesyncd), of "
            "a container on its host",
        )
    if machine.proxies:
        yield _note(
            name,
            f"{', '.join(machine.proxies)} is set: processes of a job ignore it among themselves, and object stores go "
            "through it; list a near store's host in no_proxy",
        )
    if not alone and machine.own_address and is_loopback(machine.own_address):
        yield _note(
            name,
            f"its own name {machine.own_name} stands for {machine.own_address}, which nobody else reaches; use "
            "cluster.interface (--host interface:NAME) and not --host auto there, or mend /etc/hosts",
        )


def of_network(network: Network) -> Iterator[Finding]:
    """Judge the hosts of a file, and the links between them; the first host is this machine."""
    for host in network.hosts:
        if host.machine is None:
            yield _problem(
                host.name,
                f"it cannot be asked: {host.problem.rstrip('.')}; `ssh -o BatchMode=yes {host.name} true` must work "
                "without a password, and the Python that is called there must have parashard",
            )
            continue
        yield from of_machine(host.name, host.machine, alone=len(network.hosts) == 1)
        if host.listen_problem:
            yield _problem(
                host.name,
                f"a job's processes could not listen: {host.listen_problem}; free the port, or choose another "
                "cluster.port, cluster.host or cluster.interface",
            )
        if host.unseen:
            yield _problem(
                host.name,
                f"what {_some(host.unseen)} wrote to the store is not there; use an object store, or a folder that all "
                "hosts share under one path",
            )
        if host.clock is not None:
            yield from of_clock(host.name, host.clock)
    yield from _of_versions(network)
    yield from _of_links(network.links)


def of_clock(name: str, clock: Clock) -> Iterator[Finding]:
    """Judge a clock relative to this machine's."""
    if abs(clock.ahead_s) > CLOCK_OFF_S + clock.sure_s:
        side = "ahead of" if clock.ahead_s > 0 else "behind"
        yield _warning(
            name,
            f"its clock is {duration(abs(clock.ahead_s))} {side} this machine's, and certificates, logs and traces go "
            "by it; start an NTP client (chrony or systemd-timesyncd) where it is wrong",
        )


def _of_versions(network: Network) -> Iterator[Finding]:
    found = [(host.name, host.machine) for host in network.hosts if host.machine is not None]
    for name, there in found[1:]:
        here = found[0][1]
        if there.version != here.version:
            yield _problem(
                name, f"it has parashard {there.version} and {found[0][0]} {here.version}; install one version on both"
            )
        differing = []
        if _minor(there.python) != _minor(here.python):
            differing.append(f"Python {there.python} instead of {here.python}")
        numpy = there.libraries.get("numpy"), here.libraries.get("numpy")
        if numpy[0] != numpy[1]:
            differing.append(f"numpy {numpy[0]} instead of {numpy[1]}")
        if there.architecture != here.architecture:
            differing.append(f"{there.architecture} instead of {here.architecture}")
        if differing:
            yield _warning(
                name,
                f"it has {' and '.join(differing)}, which may change bits of results; make them the same, or set "
                "cluster.allow_mixed = true",
            )


def _minor(version: str) -> str:
    return version.rpartition(".")[0]


def _of_links(links: Mapping[str, Mapping[str, Link]]) -> Iterator[Finding]:
    opened: dict[str, Link] = {}
    slow: dict[str, float] = {}
    speeds = [link.bytes_per_s for to in links.values() for link in to.values() if link.kind == "open"]
    usual = statistics.median(speeds) if speeds else 0.0
    for source, to in links.items():
        for target, link in to.items():
            back = links.get(target, {}).get(source)
            if link.kind != "open":
                yield _closed(source, target, link, back, listens=True)
                continue
            way = f"{source} to {target}"
            opened[way] = link
            other = max(usual, back.bytes_per_s if back is not None else 0.0)
            if link.bytes_per_s < max(SLOW_BYTES_PER_S, SLOW_SHARE * other):
                slow[way] = other
    if len(slow) <= SLOW_NAMED_MAX:
        yield from (_slow([way], [opened[way]], other) for way, other in slow.items())
    else:
        yield _slow(list(slow), [opened[way] for way in slow], usual)
    far = [way for way, link in opened.items() if link.round_trip_s > FAR_S]
    if far:
        times_s = [opened[way].round_trip_s for way in far]
        yield _warning(
            _some(far),
            f"a round trip takes {_between(times_s, round_trip)}, for which every pull and push waits; put them into "
            "one zone, or give workers larger batches",
        )


def _slow(ways: list[str], links: list[Link], other: float) -> Finding:
    speeds = [link.bytes_per_s for link in links]
    beside = f", and others at {speed(other)}" if max(speeds) < SLOW_SHARE * other else ""
    return _warning(
        _some(ways),
        f"bytes pass at {_between(speeds, speed)}{beside}; look for a better interface (cluster.interface), a full "
        "link, or a port that has agreed on a low speed (ethtool)",
    )


def _between(values: list[float], written: Callable[[float], str]) -> str:
    least, most = written(min(values)), written(max(values))
    return least if least == most else f"{least} to {most}"


def _closed(source: str, target: str, link: Link, back: Link | None = None, *, listens: bool = False) -> Finding:
    """Judge a direction that does not work; `listens`: the doctor's own listener is at the address."""
    works = "; the other direction works" if back is not None and back.kind == "open" else ""
    port = split_address(link.address)[1]
    allowed = f"TCP port {port}, or the range of cluster.port, from {source}"
    advice = {
        "refused": f"a firewall rejects it, or another machine has this address: allow {allowed}"
        if listens
        else f"nothing listens on port {port} there, or a firewall rejects it: start it, or allow the port",
        "silent": f"a firewall drops it, or there is no route: allow {allowed}",
        "unknown-name": f"have {source} resolve the name (DNS or /etc/hosts), or use an address",
        "foreign": "look for a duplicate address, or a proxy or redirection in between",
        "small-only": "an MTU on the way is too large: set one on all interfaces, or allow ICMP `fragmentation needed`",
        "failed": f"look at the routes and interfaces of {source}, or choose another cluster.interface",
    }
    what = "short messages pass and long ones do not" if link.kind == "small-only" else f"no connection: {link.problem}"
    return _problem(f"{source} to {target} at {link.address}", f"{what}{works}; {advice[link.kind]}")


def of_service(service: Service) -> Iterator[Finding]:
    """Judge the observations of a running service."""
    where = service.address
    if service.lookup_problem:
        name = split_address(where)[0]
        yield _problem(name, f"no such name here: {service.lookup_problem}; mend DNS or /etc/hosts, or use an address")
        return
    closed = [link for link in service.links if link.kind != "open"]
    if len(closed) == len(service.links):
        yield from (_closed("this machine", where, link) for link in closed)
        return
    for link in closed:
        yield _warning(
            where,
            f"its name stands for {link.address}, too, where nothing answers ({link.problem}), and clients may try "
            "that first; take it out of DNS or /etc/hosts, or have the service listen there",
        )
    yield from _of_tls(service)
    if service.problem:
        yield _problem(
            where,
            f"it takes connections and does not answer as parashard: {service.problem.rstrip('.')}; is it the right "
            "port, and are the certificates (--tls-dir) those of its job?",
        )
    if service.version and service.version != __version__:
        yield _problem(
            where, f"it is parashard {service.version}, and this machine has {__version__}; install one version on both"
        )
    if service.clock is not None:
        yield from of_clock(where, service.clock)
    if service.round_trip_s > SLOW_ANSWER_S:
        yield _warning(
            where, f"it takes {duration(service.round_trip_s)} to answer; look at its CPU, and at what it logs"
        )
    elsewhere = not is_loopback(split_address(where)[0])
    for name, link in service.others.items():
        if elsewhere and is_loopback(split_address(link.address)[0]):
            yield _problem(
                name,
                f"it tells others {link.address}, which only its own machine reaches; set cluster.interface, or start "
                "it with --host interface:NAME or --advertise HOST",
            )
        elif link.kind != "open":
            yield _closed("this machine", name, link)


def _of_tls(service: Service) -> Iterator[Finding]:
    where, certificate = service.address, service.certificate
    if service.tls and not service.with_credentials:
        yield _problem(where, "it speaks TLS only; give the folder of your certificate by --tls-dir")
    if service.tls is False and service.with_credentials:
        yield _problem(where, "it speaks without TLS, and --tls-dir asks for it; leave that out, or start it with TLS")
    if certificate is not None and certificate.problem:
        yield _problem(
            where,
            f"its certificate is not trusted here: {certificate.problem.rstrip('.')}; issue it for this name "
            "(`parashard certs issue --host`), by the authority in your ca.pem",
        )
    elif certificate is not None and certificate.days_left < EXPIRES_SOON_DAYS:
        yield _warning(
            where,
            f"its certificate expires in {duration(86400 * max(0.0, certificate.days_left))}; renew it (`parashard "
            "certs issue`), which running processes notice",
        )


def _some(names: Iterable[str]) -> str:
    given = list(dict.fromkeys(names))
    if len(given) > NAMED_MAX:
        return f"{', '.join(given[: NAMED_MAX - 1])} and {len(given) - NAMED_MAX + 1} others"
    return " and ".join(part for part in (", ".join(given[:-1]), given[-1]) if part)


def speed(bytes_per_s: float) -> str:
    """Format a speed in bits per second, such as "9.4 Gbit/s"."""
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def round_trip(seconds: float) -> str:
    """Format a round-trip time, such as "0.12 ms"."""
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.01 else f"{1e3 * seconds:.0f} ms"
