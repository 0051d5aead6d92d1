"""What `parashard doctor` measures, as values: of a machine, of a link between two, of a service that runs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from parashard.frozen_model import FrozenModel


class Shared(FrozenModel):
    """What a machine sees of the store."""

    url: str
    problem: str = ""
    no_answer: str = ""
    """Why it is not known whether there is a problem."""
    write_s: float = 0.0
    """Of one small content that is written durably."""


class Machine(FrozenModel):
    """What a machine says of itself."""

    version: str
    python: str
    libraries: dict[str, str]
    """Versions of those whose arithmetic or wire counts."""
    kernel: str
    architecture: str
    cores: int
    load: float
    """Processes that ran or wanted to, over the last minute."""
    memory_bytes: int
    """Of the machine, or of the container if that may have less."""
    memory_free_bytes: int
    shm_problem: str
    """Why shared memory cannot be used; empty: it can."""
    shm_free_bytes: int
    descriptors: int
    descriptors_most: int
    gpus: tuple[str, ...]
    gpu_problem: str
    """Why the GPUs that the driver lists cannot be computed on."""
    proxies: tuple[str, ...]
    """Names of the environment's variables that set one."""
    own_name: str
    own_address: str
    """What the machine's own name stands for; empty: nothing."""
    addresses: tuple[tuple[str, str], ...]
    """(interface, address)."""
    clock_set: bool | None
    """Whether the kernel says that the clock is synchronised; None: it does not say."""
    store: Shared | None = None


class Link(FrozenModel):
    """What one machine measured of its way to another's port."""

    address: str
    kind: Literal["open", "refused", "silent", "unknown-name", "foreign", "small-only", "failed"]
    """small-only: short messages pass and long ones do not."""
    problem: str = ""
    connect_s: float = 0.0
    round_trip_s: float = 0.0
    """Median of a byte there and back."""
    bytes_per_s: float = 0.0


class Clock(FrozenModel):
    """A clock, beside that of this machine."""

    ahead_s: float
    sure_s: float
    """The difference is known to within so much."""


class Host(FrozenModel):
    """A machine of a host file, or this one."""

    name: str
    problem: str = ""
    """Why it could not be asked; the rest is empty then."""
    machine: Machine | None = None
    listens_at: str = ""
    listen_problem: str = ""
    clock: Clock | None = None
    unseen: tuple[str, ...] = ()
    """Hosts whose probe file in the store this one does not see."""


class Network(FrozenModel):
    """All hosts, and every direction between two that was measured."""

    hosts: tuple[Host, ...]
    links: dict[str, dict[str, Link]] = Field(default_factory=dict)
    """From, to."""


class Certificate(FrozenModel):
    """What a server's certificate says, and whether this machine would trust it."""

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
    """Why it did not answer as a service of ours."""
    version: str = ""
    round_trip_s: float = 0.0
    clock: Clock | None = None
    others: dict[str, Link] = Field(default_factory=dict)
    """By name, the links to the addresses that a coordinator tells."""
    note: str = ""
