"""Settings: what a run of the simulation is made of, drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from sim_jobs import STEPS
from sim_world import CALM, Faults

from parashard.job.policy import Policy

JOBS: tuple[tuple[str, str], ...] = (
    ("ledger", "async"),
    ("ledger", "ssp:3"),
    ("ledger", "sync:4"),
    ("torn", "async"),
    ("torn", "ssp:2"),
    ("torn", "sync:4"),
    ("digest", "sync:4"),
    ("rows", "async"),
    ("rows", "sync:4"),
    ("ledger", "auto:2"),
    ("torn", "auto:2"),
    ("rows", "auto:2"),
)
"""Oracles and policies that the tests and `__main__` run."""

FOLLOWED = (("ledger", "async"), ("digest", "sync:4"), ("rows", "async"), ("ledger", "auto:2"))
"""Of these, the jobs that callbacks follow in some seeds."""

LEDGERS = ("ledger", "rows")


@dataclass(frozen=True)
class Setting:
    """What a run is made of, beside its seed."""

    oracle: str
    policy: Policy
    shards: int = 1
    workers: int = 1
    depth: int = 0
    lease_batch: int = 4
    messages: int = 1  # of a push to the largest shard, about
    queue_pushes: float = 100.0  # how many pushes fit into the shards' budget
    retry_budget_s: float = 30.0
    evaluate_every_epochs: float = 0.0  # 0: never
    stops_early: bool = False  # some evaluation reaches the target
    bad_step: int | None = None  # its gradient is not finite; it is given up, and skipped everywhere (P6)
    bad_step_fails: float = 1.0  # share of the attempts at it that fail; others leave their push on some shards (P24)
    bad_step_kills: bool = False  # an attempt that fails ends the worker (P26)
    checkpoint_every_s: float = 0.0
    checkpoint_every_steps: int = 0
    checkpoints_kept: int = 2
    drained_checkpoints: int = 0  # that an operator asks for
    lag_max: int = 0  # of the lags that are decided in `auto`
    decides: bool = False  # callbacks change the learning rate at milestones (P37)
    waits: bool = True  # leasing holds there until they have decided
    plans: bool = False  # they decide all rates before the first step instead, and leasing does not wait
    strays: bool = False  # processes of another run are about
    same_address: bool = False  # a shard that is started again listens where it did
    supervised: bool = True  # the coordinator is told of exits
    faults: Faults = CALM
    calm_events_max: int = 200_000


def drawn_setting(seed: int, oracle: str, policy: str, *, environment: bool = True) -> Setting:
    """Return a setting with faults of every kind, some more often than others.

    Without `environment` no store fails, no process hangs and none is started by mistake.
    """
    rng = random.Random(f"{oracle} {policy} {seed}")

    def some(most: float) -> float:
        return rng.choice((0.0, 0.3, 1.0)) * most

    bad_step = rng.choice((None, None, None, rng.randrange(STEPS))) if oracle in LEDGERS else None
    evaluate = rng.choice((0.0, 0.4, 1.0))
    faults = Faults(
        lost=some(0.05),
        late=some(0.05),
        duplicated=some(0.1),
        crash=some(0.01),
        pause=some(0.004),
        leave=some(0.01),
        shard_crash=some(0.008),
        shard_pause=some(0.003),
        shard_stop=some(0.01),
        coordinator_crash=some(0.005),
        coordinator_pause=some(0.003),
        replaced=some(0.3),
        poison=0.0 if bad_step is not None else some(0.05),
        until_s=rng.uniform(1.0, 5.0),
    )
    late = random.Random(f"{oracle} {policy} {seed} late")  # draws of its own: the others stay as they were
    if (oracle, policy) == ("digest", "sync:4") and late.random() < 0.25:
        bad_step, faults = late.randrange(STEPS), replace(faults, poison=0.0)
    setting = Setting(
        oracle,
        Policy.parse(policy),
        shards=rng.randint(2 if oracle == "digest" else 1, 4),
        workers=rng.randint(1, 4),
        depth=rng.choice((0, 0, 1, 2)),
        lease_batch=rng.choice((1, 2, 4, 16)),
        messages=rng.choice((1, 2, 2, 3, 4)),
        queue_pushes=rng.choice((0.5, 2.5, 100.0, 100.0, 100.0)),
        retry_budget_s=rng.choice((1.0, 30.0, 30.0)),
        evaluate_every_epochs=evaluate,
        stops_early=bool(evaluate) and rng.random() < 0.3,
        bad_step=bad_step,
        bad_step_fails=late.choice((1.0, 0.6)),
        bad_step_kills=late.random() < 0.3,
        checkpoint_every_s=rng.choice((0.0, 0.2, 0.5)),
        checkpoint_every_steps=rng.choice((0, 0, 3, 8)),
        checkpoints_kept=rng.choice((1, 2, 3)),
    )
    rng.choice((0, 0, 0))  # a draw that is gone; later ones stay as they were, and seeds that failed once as well
    setting = replace(
        setting,
        drained_checkpoints=rng.choice((0, 0, 1, 3)),
        lag_max=late.choice((0, 1, 3)) if policy.startswith("auto") else 0,
        decides=(oracle, policy) in FOLLOWED and late.random() < 0.4,
        waits=policy.startswith("sync") or late.random() < 0.5,
        plans=late.random() < 0.3,
        strays=rng.random() < 0.2,
        same_address=rng.random() < 0.5,
        supervised=rng.random() < 0.5,
        faults=faults,
    )
    if environment:
        faults = replace(
            faults,
            store_fails=some(0.05),
            store_slow=some(0.02),
            store_reply_lost=some(0.05),
            hang=some(0.003),
            shard_hang=some(0.001),
            coordinator_hang=some(0.002),
            stray_claim=some(0.1),
        )
    return replace(setting, faults=faults)
