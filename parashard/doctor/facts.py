"""Measurements of `parashard doctor` as values: of a machine, of a link between two, of a running service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from parashard.frozen_model import FrozenModel


class Shared(FrozenModel):
    """A machine's test of the store."""

    url: str
    problem: str = ""
    no_answer: str = ""
    """Why the test has no result."""
    write_s: float = 0.0
    """Duration of one small durable write."""


class Machine(FrozenModel):
    """Measurements of one machine."""

    version: str
    python: str
    libraries: dict[str, str]
    """Versions of libraries that affect arithmetic or the wire."""
    kernel: str
    architecture: str
    cores: int
    load: float
    """Load average over the last minute."""
    memory_bytes: int
    """Of the machine, or the container's limit if that is lower."""
    memory_free_bytes: int
    shm_problem: str
    """Why shared memory cannot be used; empty: it can."""
    shm_free_bytes: int
    descriptors: int
    descriptors_most: int
    gpus: tuple[str, ...]
    gpu_problem: str
    """Why the GPUs that the driver lists cannot be used for computing."""
    proxies: tuple[str, ...]
    """Names of the environment variables that set a proxy."""
    own_name: str
    own_address: str
    """The address that the machine's own name resolves to; empty: none."""
    addresses: tuple[tuple[str, str], ...]
    """(interface, address)."""
    clock_set: bool | None
    """Whether the kernel reports that the clock is synchronised; None: not known."""
    store: Shared | None = None


class Link(FrozenModel):
    """One machine's measurement of the link to another's port."""

    address: str
    kind: Literal["open", "refused", "silent", "unknown-name", "foreign", "small-only", "failed"]
    """small-only: short messages pass and long ones do not."""
    problem: str = ""
    connect_s: float = 0.0
    round_trip_s: float = 0.0
    """Median round trip of one byte."""
    bytes_per_s: float = 0.0


class Clock(FrozenModel):
    """A clock relative to this machine's."""

    ahead_s: float
    sure_s: float
    """Uncertainty of the difference, in each direction."""


class Host(FrozenModel):
    """A machine of a host file, or this one."""

    name: str
    problem: str = ""
    """Why it could not be queried; the rest is empty then."""
    machine: Machine | None = None
    listens_at: str = ""
    listen_problem: str = ""
    clock: Clock | None = None
    unseen: tuple[str, ...] = ()
    """Hosts whose probe file this one cannot read in the store."""


class Network(FrozenModel):
    """All hosts, and every measured direction between two."""

    hosts: tuple[Host, ...]
    links: dict[str, dict[str, Link]] = Field(default_factory=dict)
    """By source and target."""


class Certificate(FrozenModel):
    """Validity of a server's certificate, and why this machine does not trust it, if so."""

    days_left: float
    problem: str = ""


class Service(FrozenModel):
    """A running coordinator, shard or HTTP port, as seen from here."""

    address: str
    looked_up: tuple[str, ...]
    lookup_problem: str = ""
    links: tuple[Link, ...] = ()
    """To each address of its name."""
    tls: bool | None = None
    """Whether it speaks TLS; None: not known."""
    with_credentials: bool = False
    certificate: Certificate | None = None
    role: str = ""
    """coordinator, shard, worker; empty: not known."""
    problem: str = ""
    """Why it did not answer as a parashard service."""
    version: str = ""
    round_trip_s: float = 0.0
    clock: Clock | None = None
    others: dict[str, Link] = Field(default_factory=dict)
    """By name, the links to the addresses in a coordinator's status."""
    note: str = ""
