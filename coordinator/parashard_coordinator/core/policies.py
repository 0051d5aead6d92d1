"""Leasing policies: which steps a consistency policy lets the coordinator lease now. Pure; one class each."""

from __future__ import annotations

from collections.abc import Callable

from parashard.job.policy import Policy

NO_LIMIT = 1 << 62
"""A bound that no step reaches."""


class LeasingPolicy:
    """Base class of the leasing side of `auto`, `async`, `ssp:K` and `sync:N`; its defaults are `async`."""

    def limit(self, lowest_incomplete: int) -> int:
        """Return the first step that may not be leased while `lowest_incomplete` is the lowest incomplete step."""
        return NO_LIMIT

    def keep_limit(self, lowest_incomplete: int) -> int:
        """Return the first step whose lease is void if it was granted before a shard lost steps."""
        return NO_LIMIT

    def share(self, leasable: int, workers: int) -> int:
        """Return how many of the leasable steps one worker may take at once, at least 1."""
        # Half of an even share: the rest is leased later, so that workers finish together.
        return max(1, leasable // (2 * max(1, workers)))

    def reason(self, lowest_incomplete: int) -> str:
        """Say why no step past the limit is leased."""
        return "every step is leased or complete"

    def round_after(self, steps: int) -> int | None:
        """Return the round that starts after `steps` steps, a boundary or the job's end; None without rounds."""
        return None

    def boundary(self, step: int) -> int:
        """Return the first step >= `step` before which the weights can be evaluated: a round's start, or any step."""
        return step


class Async(LeasingPolicy):
    """Lease freely."""


class Ssp(LeasingPolicy):
    """Stale synchronous parallel (Ho et al., NIPS 2013): leases reach at most `bound` past the lowest incomplete step.

    The coordinator's lowest incomplete step is never above a shard's lowest missing one, and both only rise while no
    shard is restored: the bound at the lease also holds at the apply.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def limit(self, lowest_incomplete: int) -> int:
        """Lease step s only while s - lowest_incomplete <= bound."""
        return lowest_incomplete + self.bound + 1

    def reason(self, lowest_incomplete: int) -> str:
        """Name the step that all workers wait for."""
        return f"ssp:{self.bound} waits for step {lowest_incomplete}"


class _Shared(LeasingPolicy):
    """Workers share a round or a batch of `size` steps, whose gradients become one update."""

    def __init__(self, size: int) -> None:
        self.size = size

    def limit(self, lowest_incomplete: int) -> int:
        """Lease the steps of the lowest incomplete round or batch only."""
        return (lowest_incomplete // self.size + 1) * self.size

    def share(self, leasable: int, workers: int) -> int:
        """Share the whole evenly: workers wait for each other at its end, so holding steps back gains nothing."""
        return min(max(1, leasable), -(-self.size // max(1, workers)))

    def boundary(self, step: int) -> int:
        """Return the start of a round or batch."""
        return -(-step // self.size) * self.size


class Sync(_Shared):
    """Bulk synchronous rounds of `size` steps: a round is leased when the one before is complete."""

    def keep_limit(self, lowest_incomplete: int) -> int:
        """Keep leases of the lowest incomplete round only."""
        return self.limit(lowest_incomplete)

    def reason(self, lowest_incomplete: int) -> str:
        """Name the round that all workers wait for."""
        return f"sync:{self.size} waits for round {lowest_incomplete // self.size}"

    def round_after(self, steps: int) -> int | None:
        """Return the round that starts after `steps` steps; after a short last round, the number that would follow."""
        return -(-steps // self.size)


class Auto(_Shared):
    """Batches of `size` steps, their parts: batch b is leased when all batches before b - `lag` are complete.

    With a lag of 0 each gradient is computed at the weights that it updates, as on one machine. The controller may
    raise it: then up to `lag` further batches are in progress, and a gradient is at most that many updates stale.
    Shards have no rounds, and any lease may be kept: its gradient is applied once its batch is complete.
    """

    lag = 0

    def limit(self, lowest_incomplete: int) -> int:
        """Lease the lowest incomplete batch and `lag` more."""
        return super().limit(lowest_incomplete) + self.lag * self.size

    def reason(self, lowest_incomplete: int) -> str:
        """Name the batch that all workers wait for."""
        return f"auto:{self.size} waits for batch {lowest_incomplete // self.size}"


def leasing_policy(policy: Policy) -> LeasingPolicy:
    """Return the leasing policy that a job file asks for."""
    bounded: dict[str, Callable[[int], LeasingPolicy]] = {"auto": Auto, "ssp": Ssp, "sync": Sync}
    return Async() if policy.kind == "async" else bounded[policy.kind](policy.bound)
