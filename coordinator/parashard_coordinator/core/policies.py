"""Consistency as a leasing policy: which steps may be leased now. Pure; one class for each, chosen at construction."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from parashard.errors import ConfigurationError
from parashard.job.policy import Policy


class LeasingPolicy(Protocol):
    """What distinguishes `auto`, `async`, `ssp:K` and `sync:N` for the coordinator."""

    def limit(self, lowest_incomplete: int) -> int:
        """Return the first step that may not be leased while `lowest_incomplete` is the lowest incomplete step."""

    def keep_limit(self, lowest_incomplete: int) -> int:
        """Return the first step whose lease is void if it was granted before a shard lost steps."""

    def share(self, leasable: int, workers: int) -> int:
        """Return how many of the leasable steps one of the live workers may take at once, at least 1."""

    def reason(self, lowest_incomplete: int) -> str:
        """Say why no step past the limit is leased."""

    def round_of(self, step: int) -> int | None:
        """Return the round that begins at or holds a step; None where there are no rounds."""

    def boundary(self, step: int) -> int:
        """Return the first step >= `step` at which the weights can be judged: the start of a round, or any step."""


def guided_share(leasable: int, workers: int) -> int:
    """Return half of an even share: the rest is handed out later, so that workers finish together."""
    return max(1, leasable // (2 * max(1, workers)))


class Async:
    """Lease freely."""

    def limit(self, lowest_incomplete: int) -> int:
        """Return a bound that no step reaches."""
        return 1 << 62

    def keep_limit(self, lowest_incomplete: int) -> int:
        """Any lease may be kept."""
        return 1 << 62

    def share(self, leasable: int, workers: int) -> int:
        """Shrink near the end of the job, where a large share would leave others idle."""
        return guided_share(leasable, workers)

    def reason(self, lowest_incomplete: int) -> str:
        """Nothing is held back: every step is leased or complete."""
        return "every step is leased or complete"

    def round_of(self, step: int) -> int | None:
        """There are no rounds."""
        return None

    def boundary(self, step: int) -> int:
        """Any step."""
        return step


class Ssp(NamedTuple):
    """Stale synchronous parallel (Ho et al., NIPS 2013): leases reach at most `bound` past the lowest incomplete step.

    The coordinator's lowest incomplete step is never above a shard's lowest missing one, and both only rise while no
    shard is restored: what holds at the lease holds at the apply.
    """

    bound: int

    def limit(self, lowest_incomplete: int) -> int:
        """Lease step s only while s - lowest_incomplete <= bound."""
        return lowest_incomplete + self.bound + 1

    def keep_limit(self, lowest_incomplete: int) -> int:
        """Any lease may be kept: the bound holds when a lease is granted."""
        return 1 << 62

    def share(self, leasable: int, workers: int) -> int:
        """Leave room in the window for the others."""
        return guided_share(leasable, workers)

    def reason(self, lowest_incomplete: int) -> str:
        """Name the step that all workers wait for."""
        return f"ssp:{self.bound} waits for step {lowest_incomplete}"

    def round_of(self, step: int) -> int | None:
        """There are no rounds."""
        return None

    def boundary(self, step: int) -> int:
        """Any step."""
        return step


class Sync(NamedTuple):
    """Bulk synchronous rounds of `round_steps` steps: a round is leased when the one before is complete."""

    round_steps: int

    def limit(self, lowest_incomplete: int) -> int:
        """Lease the steps of the lowest incomplete round only."""
        return (lowest_incomplete // self.round_steps + 1) * self.round_steps

    def keep_limit(self, lowest_incomplete: int) -> int:
        """Leases of the lowest incomplete round only."""
        return self.limit(lowest_incomplete)

    def share(self, leasable: int, workers: int) -> int:
        """Share the whole round evenly: a barrier follows, so nothing is gained by keeping some back."""
        return min(max(1, leasable), -(-self.round_steps // max(1, workers)))

    def reason(self, lowest_incomplete: int) -> str:
        """Name the round that all workers wait for."""
        return f"sync:{self.round_steps} waits for round {lowest_incomplete // self.round_steps}"

    def round_of(self, step: int) -> int | None:
        """Return the step's round; a step count that ends a short last round belongs to the next."""
        return -(-step // self.round_steps)

    def boundary(self, step: int) -> int:
        """Return the start of a round."""
        return -(-step // self.round_steps) * self.round_steps


class Auto:
    """Batches of `parts` steps: a batch is leased when all batches up to `lag` before it are complete.

    With a lag of 0 each gradient is computed at the weights that it moves, as on one machine. The controller may raise
    it: then up to `lag` further batches are under way, and a gradient is at most that many updates old.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.lag = 0

    def limit(self, lowest_incomplete: int) -> int:
        """Lease the lowest incomplete batch and `lag` more."""
        return (lowest_incomplete // self.parts + 1 + self.lag) * self.parts

    def keep_limit(self, lowest_incomplete: int) -> int:
        """Any lease may be kept: it moves the weights with its batch, whenever that is whole."""
        return 1 << 62

    def share(self, leasable: int, workers: int) -> int:
        """Share a batch evenly."""
        return min(max(1, leasable), -(-self.parts // max(1, workers)))

    def reason(self, lowest_incomplete: int) -> str:
        """Name the batch that all workers wait for."""
        return f"auto:{self.parts} waits for batch {lowest_incomplete // self.parts}"

    def round_of(self, step: int) -> int | None:
        """There are no rounds: shards name none."""
        return None

    def boundary(self, step: int) -> int:
        """Return the first step of a batch."""
        return -(-step // self.parts) * self.parts


def leasing_policy(policy: Policy) -> LeasingPolicy:
    """Return the leasing policy that a job file asks for."""
    if policy.kind == "auto":
        return Auto(policy.bound)
    if policy.kind == "async":
        return Async()
    if policy.kind == "ssp":
        return Ssp(policy.bound)
    if policy.kind == "sync":
        return Sync(policy.bound)
    raise ConfigurationError(f"consistency.policy {policy} is unknown")
