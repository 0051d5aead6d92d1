"""Output of `parashard doctor`: tables of measurements, then the findings. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from parashard.doctor.facts import Host, Link, Network, Service
from parashard.doctor.findings import Finding, Severity, round_trip, speed
from parashard.figures import counted, duration, gibibytes
from parashard.process.addresses import WILDCARDS, split_address

SHOWN_HOSTS_MAX = 8
"""Most hosts in a table of all directions; with more, only the worst directions are shown."""
WORST_SHOWN = 10


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as aligned lines; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def of_hosts(network: Network) -> list[str]:
    """Return the lines of all hosts."""
    if len(network.hosts) == 1 and network.hosts[0].machine is not None:
        return _alone(network.hosts[0])
    rows = [["host", "parashard", "Python", "cores", "load", "GiB free", "files", "GPUs", "clock", "address"]]
    rows += [_row(host) for host in network.hosts]
    return table(rows)


def _row(host: Host) -> list[str]:
    found = host.machine
    if found is None:
        return [host.name, "no answer", *[""] * 8]
    clock = "" if host.clock is None else f"{round(host.clock.ahead_s, 3) + 0.0:+.3f} s"
    memory = f"{gibibytes(found.memory_free_bytes)} of {gibibytes(found.memory_bytes)}"
    where = host.listens_at or "no port"
    own = [
        host.name,
        found.version,
        found.python,
        str(found.cores),
        f"{found.load:.0f}",
        memory,
        str(found.descriptors),
    ]
    return [*own, str(len(found.gpus)), clock, where]


def _alone(host: Host) -> list[str]:
    found = host.machine
    assert found is not None
    lines = [
        ("parashard", f"{found.version}, Python {found.python}, {found.kernel} {found.architecture}"),
        ("libraries", ", ".join(f"{name} {version}" for name, version in found.libraries.items())),
        ("cores", f"{found.cores}, load {found.load:.1f}"),
        ("memory", f"{gibibytes(found.memory_free_bytes)} GiB free of {gibibytes(found.memory_bytes)}"),
        ("/dev/shm", f"{gibibytes(found.shm_free_bytes)} GiB free"),
        ("open files", f"{found.descriptors:,} of at most {found.descriptors_most:,}"),
        ("GPUs", ", ".join(found.gpus) or "none"),
        ("own name", f"{found.own_name}, {found.own_address or 'which stands for no address'}"),
        ("interfaces", ", ".join(f"{name} {address}" for name, address in found.addresses) or "not known"),
    ]
    if host.listens_at and split_address(host.listens_at)[0] not in WILDCARDS:
        lines.append(("listens at", host.listens_at))
    if found.store is not None and found.store.write_s:
        lines.append(("store", f"{found.store.url}, a write takes {1000 * found.store.write_s:.0f} ms"))
    return table(lines)


def of_links(network: Network) -> list[str]:
    """Return the lines of the measured directions."""
    names = [host.name for host in network.hosts if host.name in network.links]
    if len(names) < 2:
        return []
    if len(names) <= SHOWN_HOSTS_MAX:
        rows = [["from \\ to", *names]]
        rows += [[source, *[_cell(network.links[source].get(target)) for target in names]] for source in names]
        return table(rows)
    directions = [(link, source, target) for source, to in network.links.items() for target, link in to.items()]
    worst = sorted(directions, key=lambda one: (one[0].kind == "open", one[0].bytes_per_s))[:WORST_SHOWN]
    head = f"the slowest {len(worst)} of {len(directions)} directions"
    return table([[head, "to", ""], *[[source, target, _cell(link)] for link, source, target in worst]])


def _cell(link: Link | None) -> str:
    if link is None:
        return "-"
    if link.kind != "open":
        return link.kind
    return f"{speed(link.bytes_per_s)} {round_trip(link.round_trip_s)}"


def of_service(service: Service) -> list[str]:
    """Return the lines of a running service."""
    lines = [("address", f"{service.address}: {', '.join(service.looked_up) or 'no name here'}")]
    lines += [
        ("connects", f"{link.address} in {round_trip(link.connect_s)}" if link.kind == "open" else _failed(link))
        for link in service.links
    ]
    if service.tls is not None:
        certificate = service.certificate
        shown = f", certificate for {certificate.days_left:.0f} more days" if certificate is not None else ""
        lines.append(("TLS", f"{'yes' if service.tls else 'no'}{shown if service.tls else ''}"))
    if service.role:
        version = f" of parashard {service.version}" if service.version else ""
        answers = f", answers in {round_trip(service.round_trip_s)}" if service.round_trip_s else ""
        lines.append(("is", f"a {service.role}{version}{answers}"))
    if service.clock is not None:
        lines.append(("clock", f"{service.clock.ahead_s:+.1f} s, within {duration(service.clock.sure_s)}"))
    lines += [
        (name, f"{link.address}, connects in {round_trip(link.connect_s)}" if link.kind == "open" else _failed(link))
        for name, link in service.others.items()
    ]
    if service.note:
        lines.append(("note", service.note))
    return table(lines)


def _failed(link: Link) -> str:
    return f"{link.address}: {link.problem}"


def of_findings(found: Sequence[Finding], width: int) -> list[tuple[Severity, str]]:
    """Return the lines of findings, each with its severity, wrapped at a width (0: not wrapped)."""
    lines = []
    for one in found:
        first, rest = f"{one.severity:<8} ", " " * 9
        text = f"{one.where}: {one.text}{'' if one.text[-1] in '?.' else '.'}"
        wrapped = textwrap.wrap(text, width - 9, break_on_hyphens=False, break_long_words=False) if width else [text]
        lines += [(one.severity, (first if number == 0 else rest) + line) for number, line in enumerate(wrapped)]
    return lines


def summary(found: Sequence[Finding]) -> str:
    """Return the numbers of problems and warnings, in words."""
    counts = {severity: sum(one.severity is severity for one in found) for severity in Severity}
    if not counts[Severity.PROBLEM] and not counts[Severity.WARNING]:
        return "no problem found"
    return f"{counted(counts[Severity.PROBLEM], 'problem')}, {counted(counts[Severity.WARNING], 'warning')}"
