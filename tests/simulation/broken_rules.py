"""The protocol with one rule switched off: which parts forget it, and which oracle is to see it.

The parts are in `broken_shards` and `broken_coordinators`; what has no class of its own is a habit, left out by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from broken_coordinators import (
    BlindRounds,
    CountingLeases,
    CreditingRecord,
    HastyRecord,
    KeptEvaluations,
    LaglessRecord,
    LosingLeases,
    MergingLeases,
    NewestRate,
    NoRollback,
    PausingCore,
    TrustingLeases,
    UnboundedLeases,
    UncheckedRunStore,
    UncountedCore,
    record_with,
    record_with_callbacks,
)
from broken_shards import (
    ArrivalOrder,
    CountingEmptyPushes,
    EagerRounds,
    Forgetful,
    HastyStorage,
    HospitableShard,
    KeepingRounds,
    KeptCount,
    LateSet,
    PartsAtOnce,
    UncopiedStorage,
    UnnamedRounds,
    UnwaitingShard,
)
from broken_tables import ForgottenMoves, OwnTime
from sim_parts import REAL, Parts
from sim_settings import Setting, drawn_setting
from sim_world import Faults

FAULTS = {each.name for each in fields(Faults)}
CALM_EVENTS_MAX = 15_000  # far more than any job needs with the rule on, where the shards have memory


@dataclass(frozen=True)
class BrokenRule:
    """A rule that is off, the job whose oracle is to see it, and seeds with which it soon does.

    `needs` names what must have happened in a run for the rule to matter, and `often` the parts of a drawn setting that
    make it happen often. Other seeds: `python tests/simulation --off`.
    """

    parts: Parts
    oracle: str
    policy: str
    sees: str
    seeds: tuple[int, ...]
    needs: str
    often: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, seed: int) -> Setting:
        """Return a drawn setting in which the rule matters, and a job that is stuck is soon seen to be."""
        drawn = drawn_setting(seed, self.oracle, self.policy)
        rates = {name: value for name, value in self.often.items() if name in FAULTS}
        rest = {name: value for name, value in self.often.items() if name not in FAULTS}
        faults = replace(drawn.faults, **rates)
        return replace(drawn, faults=faults, calm_events_max=CALM_EVENTS_MAX, queue_pushes=100.0, **rest)


def _left_out(*habits: str) -> Parts:
    return replace(REAL, habits=frozenset(habits))


STOPS = {
    "evaluate_every_epochs": 0.4,
    "stops_early": True,
    "coordinator_crash": 0.02,
    "shard_crash": 0.01,
    "until_s": 10.0,
}
SUCCEEDED = {
    "evaluate_every_epochs": 0.4,
    "stops_early": True,
    "supervised": False,
    "coordinator_pause": 0.02,
    "replaced": 1.0,
    "until_s": 10.0,
}
DRAINS = {"drained_checkpoints": 3, "crash": 0.01}
SHARDS_AND_COORDINATORS = (
    "shard_crash",
    "shard_stop",
    "shard_hang",
    "shard_pause",
    "coordinator_crash",
    "coordinator_hang",
    "coordinator_pause",
    "stray_claim",
    "store_slow",
)
JUDGED = {
    "evaluate_every_epochs": 3.0,
    "shard_crash": 0.005,
    "checkpoint_every_s": 0.0,
    "checkpoint_every_steps": 8,
    "until_s": 30.0,
}
RATES = {"decides": True, "plans": False, "bad_step": None, "until_s": 10.0}
RETURNS = {"shard_crash": 0.01}

FAILED_SAVES = {  # of shards that live: a restore counts the rows, and goes back to a checkpoint that has them all
    **dict.fromkeys(("shard_crash", "shard_stop", "shard_hang", "shard_pause", "store_slow"), 0.0),
    "store_fails": 0.3,
    "checkpoint_every_steps": 3,
    "drained_checkpoints": 0,
    "shards": 1,
    "until_s": 30.0,
}

SKIPS = {
    **dict.fromkeys(FAULTS - {"lost", "late", "duplicated", "until_s"}, 0.0),  # a worker dies between two shards
    "crash": 0.06,
    "until_s": 20.0,
    "shards": 4,
    "workers": 3,
    "depth": 1,
    "bad_step": 9,
    "bad_step_fails": 0.7,
    "stops_early": False,
}

BROKEN_RULES: Mapping[str, BrokenRule] = {
    "P1-forgotten-step": BrokenRule(
        replace(REAL, immediate=Forgetful), "ledger", "async", "ledger", (9, 11, 1), "ack: duplicate"
    ),
    "P1-set-after-weights": BrokenRule(
        replace(REAL, immediate=LateSet),
        "ledger",
        "async",
        "ledger",
        (7, 13),
        "shard restored a checkpoint",
        {"checkpoint_every_steps": 3},
    ),
    "P1-moved-beside-a-checkpoint": BrokenRule(
        replace(REAL, storage=UncopiedStorage),
        "ledger",
        "async",
        "ledger",
        (3, 12),
        "pushes beside a checkpoint",
        {"checkpoint_every_steps": 3, "shard_crash": 0.01},
    ),
    "P2-any-run": BrokenRule(
        replace(REAL, shard=HospitableShard),
        "ledger",
        "async",
        "ledger",
        (5, 0, 2),
        "stray: wrong-run",
        {"strays": True},
    ),
    "P3-any-incarnation's-ack": BrokenRule(
        replace(REAL, job_record=CreditingRecord), "ledger", "async", "progress", (3, 8), "shard_crash", RETURNS
    ),
    "P3-merged-registration": BrokenRule(
        replace(REAL, job_record=record_with(MergingLeases)),
        "ledger",
        "async",
        "progress",
        (3, 5, 6),
        "shard_crash",
        RETURNS,
    ),
    "P4-calls-mixed": BrokenRule(
        _left_out("P4-calls-mixed"),
        "torn",
        "async",
        "torn",
        (342, 379, 396),
        "push cut in the middle",
        {"crash": 0.01, "messages": 4},
    ),
    "P5-lost-with-its-lease": BrokenRule(
        replace(REAL, job_record=record_with(LosingLeases)),
        "ledger",
        "async",
        "progress",
        (3, 10),
        "crash",
        {"crash": 0.01},
    ),
    "P5-done-with-its-lease": BrokenRule(
        replace(REAL, job_record=record_with(TrustingLeases)),
        "ledger",
        "async",
        "progress",
        (12, 26),
        "leave",
        {"leave": 0.02, "poison": 0.05},
    ),
    "P6-unchecked": BrokenRule(
        _left_out("P6-unchecked"),
        "ledger",
        "async",
        "ledger",
        (5, 3, 2),
        "skipped",
        {"bad_step": 5, "bad_step_fails": 1.0, "bad_step_kills": False, "shards": 3, "poison": 0.0},
    ),
    "P7-no-checkpoint": BrokenRule(
        _left_out("P7-no-checkpoint"), "ledger", "async", "checkpoint", (3, 0, 2), "ack: applied"
    ),
    "P7-decision-not-stored": BrokenRule(
        _left_out("P7-decision-not-stored"), "ledger", "async", "stop", (133, 222), "coordinator_crash", STOPS
    ),
    "P8-drain-leases-nothing": BrokenRule(
        replace(REAL, core=PausingCore), "ledger", "async", "progress", (5, 2), "drained checkpoint", DRAINS
    ),
    "P8-unequal-sets": BrokenRule(
        replace(_left_out("P8-unequal-sets"), job_record=HastyRecord),
        "ledger",
        "async",
        "checkpoint",
        (2, 5, 0),
        "drained checkpoint",
        DRAINS,
    ),
    "P9-no-limit": BrokenRule(
        replace(REAL, job_record=record_with(UnboundedLeases)), "ledger", "ssp:3", "ssp", (3, 0, 4), "ack: applied"
    ),
    "P10-apply-at-once": BrokenRule(
        replace(REAL, rounds=EagerRounds),
        "digest",
        "sync:4",
        "rollback",
        (7, 14),
        "crash between two shards",
        {**dict.fromkeys(SHARDS_AND_COORDINATORS, 0.0), "crash": 0.02, "shards": 4, "until_s": 5.0},
    ),
    "P11-unnamed-rounds": BrokenRule(
        replace(REAL, rounds=UnnamedRounds), "digest", "sync:4", "digest", (7, 1, 2), "ack: buffered"
    ),
    "P12-no-rollback": BrokenRule(
        replace(REAL, book=NoRollback), "digest", "sync:4", "progress", (1, 6, 12), "rollback", RETURNS
    ),
    "P13-arrival-order": BrokenRule(
        replace(REAL, rounds=ArrivalOrder), "digest", "sync:4", "digest", (2, 1, 3), "ack: buffered"
    ),
    "P14-write-before-check": BrokenRule(
        replace(REAL, storage=HastyStorage),
        "ledger",
        "async",
        "ledger",
        (15, 5),
        "poison",
        {"poison": 0.05, "bad_step": None},
    ),
    "P15-empty-push-counts": BrokenRule(
        replace(REAL, rounds=CountingEmptyPushes),
        "digest",
        "sync:4",
        "digest",
        (0, 1, 2),
        "skipped",
        {"bad_step": 5, "bad_step_fails": 1.0, "bad_step_kills": False, "poison": 0.0},
    ),
    "P15-count-kept": BrokenRule(
        replace(REAL, rounds=KeptCount), "digest", "sync:4", "digest", (5, 6, 7), "round began again", SKIPS
    ),
    "P23-claim-unchecked": BrokenRule(
        replace(REAL, run_store=UncheckedRunStore),
        "ledger",
        "async",
        "stop",
        (168, 368),
        "two of one coordinator",
        SUCCEEDED,
    ),
    "P23-superseded-goes-on": BrokenRule(
        _left_out("P23-superseded-goes-on"),
        "ledger",
        "async",
        "progress",
        (0, 2, 4),
        "stray_claim",
        {"stray_claim": 0.3, "checkpoint_every_steps": 3, "shard_crash": 0.0, "shard_stop": 0.0},
    ),
    "P24-skip-after-a-partial-push": BrokenRule(
        replace(REAL, rounds=KeepingRounds, job_record=record_with(CountingLeases), book=BlindRounds),
        "ledger",
        "sync:4",
        "skip",
        (3, 11),
        "skip after a partial push",
        SKIPS,
    ),
    "P26-uncounted-deaths": BrokenRule(
        replace(REAL, core=UncountedCore),
        "ledger",
        "async",
        "progress",
        (0, 1, 2),
        "killed by its model",
        {**SKIPS, "bad_step_kills": True, "bad_step_fails": 1.0},
    ),
    "P25-held-evaluations-kept": BrokenRule(
        replace(REAL, core=KeptEvaluations), "torn", "async", "report", (133, 141), "void evaluation", JUDGED
    ),
    "P29-a-time-of-its-own": BrokenRule(
        replace(REAL, tables=OwnTime),
        "rows",
        "sync:4",
        "rows",
        (0, 15, 68),
        "shard restored a checkpoint",
        {**RETURNS, "checkpoint_every_steps": 4, "shard_crash": 0.02, "until_s": 20.0},
    ),
    "P33-an-increment-without-what-failed": BrokenRule(
        replace(REAL, tables=ForgottenMoves),
        "rows",
        "async",
        "rows",
        (0, 1, 47),
        "store_fails",
        FAILED_SAVES,
    ),
    "P37-leased-at-the-newest-rate": BrokenRule(
        replace(REAL, job_record=record_with_callbacks(NewestRate)),
        "digest",
        "sync:4",
        "digest",
        (12, 22, 28),
        "rollback",
        RATES | RETURNS,
    ),
    "P39-parts-at-once": BrokenRule(
        replace(REAL, batches=PartsAtOnce), "ledger", "auto:2", "batch", (0, 1), "ack: buffered"
    ),
    "P39-pulled-too-early": BrokenRule(
        replace(REAL, shard=UnwaitingShard), "ledger", "auto:2", "lag", (0, 1), "pull too early"
    ),
    "P39-lag-forgotten": BrokenRule(
        replace(REAL, job_record=LaglessRecord),
        "ledger",
        "auto:2",
        "lag",
        (0, 1),
        "coordinator started again",
        {"lag_max": 3, "coordinator_crash": 0.02, "until_s": 10.0},
    ),
}
