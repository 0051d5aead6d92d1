"""Membership: the workers and the shards of a job, each with a name and incarnations.

Pure: `now_s` is an argument. Knows which processes are alive, not their leases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from parashard.errors import NotReady, Superseded, UnknownWorker, WrongRun

PHASES: tuple[str, ...] = ("lease", "pull", "compute", "push", "transfer", "gpu_wait")


class GpuMemory(NamedTuple):
    """The memory of a worker's GPU; `used_bytes` includes other processes."""

    used_bytes: int
    total_bytes: int


@dataclass
class WorkerRecord:
    """One worker's present incarnation, and counters of all its incarnations."""

    name: str
    incarnation: int
    device: str
    http_address: str
    last_seen_s: float
    token: int = 0  # drawn by its process; 0: it has none
    live: bool = True  # set only by `Workers`, which has an index of the live ones
    sequence: int = 0
    stored: int = 0  # number of the last call whose report is stored for a later coordinator
    restarts: int = 0
    restarted: bool = False  # this incarnation is another process than the one before
    steps_complete: int = 0
    computing: tuple[int, ...] = ()  # steps that it has announced it is computing
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    gpu_memory: GpuMemory | None = None


ANY_PROCESS = -1
"""A token in `EarlierWorker`: the worker's next process does not count as a restart."""


LIVE, GONE, ENDED = 0, 1, 2
"""States of an earlier worker: heard within its lease time; silent or left; its process's end is counted."""


class EarlierWorker(NamedTuple):
    """A worker as an earlier coordinator knew it."""

    token: int
    restarts: int
    steps_complete: int
    state: int = LIVE


def shown(incarnation: int) -> str:
    """Format a worker's incarnation for people: its number, and its coordinator's if that is not the first."""
    coordinator, number = (incarnation >> 32) + 1, incarnation & 0xFFFFFFFF
    return str(number) if coordinator == 1 else f"{number} under coordinator {coordinator}"


class Workers:
    """The workers that have ever joined.

    With `same_arithmetic` a worker whose arithmetic differs from the first one's is refused. A later coordinator
    assigns greater incarnations, although it does not know the earlier ones.
    """

    def __init__(self, lease_ttl_s: float, *, same_arithmetic: bool, coordinator_incarnation: int = 1) -> None:
        self._lease_ttl_s = lease_ttl_s
        self._first_incarnation = (coordinator_incarnation - 1 << 32) + 1
        self._same_arithmetic = same_arithmetic
        self.fingerprint = ""
        self.by_name: dict[str, WorkerRecord] = {}
        self.live: dict[str, WorkerRecord] = {}
        """Workers that are not known to have ended."""
        self._by_token: dict[int, WorkerRecord] = {}
        self._guest = 0  # every guest with a lower number is live
        self._earlier: dict[str, EarlierWorker] = {}  # workers that have not joined this coordinator yet

    def resume(self, earlier: Mapping[str, EarlierWorker]) -> None:
        """Restore the workers that an earlier coordinator knew."""
        self._earlier = dict(earlier)

    def reset_for_resume(self) -> None:
        """Do not count the next joins as restarts: the user has resumed the run."""
        self._earlier = {name: known._replace(token=ANY_PROCESS, state=GONE) for name, known in self._earlier.items()}

    def known(self, ended: Collection[str]) -> dict[str, EarlierWorker]:
        """Return each worker's record for a later coordinator; `ended`: workers whose process has ended."""
        here = {}
        for name, worker in self.by_name.items():
            state = ENDED if name in ended else LIVE if worker.live else GONE
            here[name] = EarlierWorker(worker.token, worker.restarts, worker.steps_complete, state)
        return self._earlier | here

    def register(
        self, name: str, fingerprint: str, device: str, http_address: str, now_s: float, token: int = 0
    ) -> WorkerRecord:
        """Register a worker's new incarnation; an earlier one under the same name is superseded from now on."""
        # A worker without a name gets the lowest free "guest-N": the launcher assigns "worker-N". A process that
        # registers again, because it lost the answer, keeps its incarnation.
        if self._same_arithmetic and self.fingerprint and fingerprint != self.fingerprint:
            raise WrongRun(
                "this worker computes with other arithmetic than the job's first one, so weights would not be "
                f"reproducible (cluster.allow_mixed = true drops that promise): {fingerprint} is not {self.fingerprint}"
            )
        self.fingerprint = self.fingerprint or fingerprint
        known = self.worker_of(token)
        if known is not None:
            known.last_seen_s = now_s
            self._mark_live(known)
            return known
        name = self.name_for(name)
        earlier = self.by_name.get(name)
        incarnation = earlier.incarnation + 1 if earlier else self._first_incarnation
        worker = WorkerRecord(name, incarnation, device, http_address, now_s, token)
        before = earlier or self._earlier.pop(name, None)
        if before:
            worker.restarted = bool(earlier) or before.token not in (ANY_PROCESS, token)
            worker.restarts = before.restarts + worker.restarted
            worker.steps_complete = before.steps_complete
        self.by_name[name] = worker
        self._by_token[token] = worker
        if earlier:
            self._by_token.pop(earlier.token, None)
        self._mark_live(worker)
        return worker

    def mark_left(self, worker: WorkerRecord) -> None:
        """Mark a worker as not live until it is heard again."""
        worker.live = False
        self.live.pop(worker.name, None)
        guest = worker.name.removeprefix("guest-")
        if guest.isdecimal():  # a user's worker may be named by a bare number: harmless, `_guest` is a lower bound
            self._guest = min(self._guest, int(guest))

    def _mark_live(self, worker: WorkerRecord) -> None:
        worker.live = True
        self.live[worker.name] = worker

    def name_for(self, name: str) -> str:
        """Return the name for a worker that asks for `name`: a free guest's, if it is empty or a live guest's."""
        known = self.by_name.get(name)  # a new coordinator may have assigned a returning guest's name to another one
        if name and not (name.startswith("guest-") and known is not None and known.live):
            return name
        while f"guest-{self._guest}" in self.live:
            self._guest += 1
        return f"guest-{self._guest}"

    def worker_of(self, token: int) -> WorkerRecord | None:
        """Return the incarnation of a process that joined before, unless another process has its name now."""
        return self._by_token.get(token) if token else None

    def record_call(self, name: str, incarnation: int, sequence: int, now_s: float) -> WorkerRecord:
        """Return the worker that sent a call, and mark it live."""
        # Raises `UnknownWorker` if no worker of that name has joined this coordinator, `Superseded` if a newer
        # incarnation has its name, and `NotReady` if a call with this or a later number was answered already: this one
        # was duplicated or delayed by the network. No state changes then.
        worker = self.by_name.get(name)
        if worker is None:
            raise UnknownWorker(f"{name} is not known to this coordinator; it has to join again")
        if worker.incarnation != incarnation:
            raise Superseded(
                f"{name} is incarnation {shown(worker.incarnation)} now; incarnation {shown(incarnation)} must stop"
            )
        if sequence <= worker.sequence:
            raise NotReady(f"{name}: call {sequence} comes after call {worker.sequence}")
        worker.sequence = sequence
        worker.last_seen_s = now_s
        self._mark_live(worker)
        return worker

    def is_latest_call(self, name: str, incarnation: int, sequence: int) -> bool:
        """Tell whether a held call is still its live worker's latest; a grant to any other call would be lost."""
        worker = self.by_name.get(name)
        return worker is not None and worker.live and worker.incarnation == incarnation and worker.sequence == sequence

    def silent(self, now_s: float) -> list[WorkerRecord]:
        """Return the live workers that have been silent for longer than the lease time."""
        return [worker for worker in self.live.values() if now_s - worker.last_seen_s > self._lease_ttl_s]


class ShardRegistration(NamedTuple):
    """A shard's incarnation and its addresses, as it registered them."""

    incarnation: int
    address: str
    http_address: str
    data_address: str = ""
    local_path: str = ""


class Shards:
    """The shards of the plan; a registration replaces the previous one.

    A later coordinator begins with a greater `first_view`, so that workers refresh their view.
    """

    def __init__(self, count: int, first_view: int = 0) -> None:
        self._registrations: list[ShardRegistration | None] = [None] * count
        self._incarnations = (0,) * count  # of these; 0: none
        self.view = first_view

    @property
    def all_registered(self) -> bool:
        """Every shard of the plan has registered; nothing is leased before."""
        return None not in self._registrations

    def registration(self, shard: int) -> ShardRegistration | None:
        """Return a shard's registration, or None."""
        return self._registrations[shard]

    def registrations(self) -> list[ShardRegistration]:
        """Return every shard's registration, by index."""
        missing = [str(i) for i, registration in enumerate(self._registrations) if registration is None]
        if missing:
            raise NotReady(f"waiting for shard {', '.join(missing)} to register")
        return [registration for registration in self._registrations if registration is not None]

    def register(self, shard: int, registration: ShardRegistration) -> bool:
        """Replace a shard's registration; return whether its incarnation has changed."""
        if not 0 <= shard < len(self._registrations):
            raise WrongRun(f"the plan has shards 0..{len(self._registrations) - 1}, found shard {shard}")
        present = self._registrations[shard]
        if present is not None and present.incarnation > registration.incarnation:
            raise Superseded(
                f"shard {shard}: incarnation {present.incarnation} is registered, {registration.incarnation} is older"
            )
        self._registrations[shard] = registration
        before, after = self._incarnations[:shard], self._incarnations[shard + 1 :]
        self._incarnations = (*before, registration.incarnation, *after)
        self.view += present != registration
        return present is None or present.incarnation != registration.incarnation

    def incarnations(self) -> tuple[int, ...]:
        """Return the registered incarnations by shard; 0: none."""
        return self._incarnations

    def acknowledged(self, incarnations: list[int]) -> list[int]:
        """Return the shards whose registered incarnation is the one that acknowledged."""
        if self.all_registered and tuple(incarnations) == self._incarnations:  # as nearly always
            return list(range(len(self._incarnations)))
        return [
            shard
            for shard, (registration, incarnation) in enumerate(zip(self._registrations, incarnations, strict=False))
            if registration is not None and registration.incarnation == incarnation
        ]
