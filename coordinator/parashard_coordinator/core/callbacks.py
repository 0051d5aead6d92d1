"""What callbacks decide, and what they are told of next; `parashard_coordinator.core.callback_progress` has both.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from parashard.errors import ConfigurationError, NotReady
from parashard.figures import metric
from parashard_coordinator.core.callback_progress import ENDS_AT_ONCE, DecidedRate
from parashard_coordinator.core.calls import FollowAnswer, FollowCall, JobState
from parashard_coordinator.core.job_record import JobRecord

UNUSED_RATE = "unused-rate"  # a problem's key
RATES_SHOWN = 4


def follow(job: JobRecord, call: FollowCall) -> FollowAnswer:
    """Take what callbacks decided at the milestone that they have handled last, and tell them of the next one."""
    progress = job.callback_progress
    if job.state is JobState.STARTING:
        raise NotReady("not every shard is up")
    rate = call.learning_rate
    for one in [] if rate is None else [rate, *(planned for _, planned in call.planned)]:
        if not 0.0 <= one < math.inf:
            raise ConfigurationError(f"a learning rate must be finite and not below 0, found {one!r}")
    if (rate is not None or call.stop_reason) and not progress.decides:
        raise ConfigurationError("callbacks decide nothing in this run: it was started without --callbacks=decide")
    if call.handled > progress.handled:
        job.leases.reach(call.handled - 1)  # an earlier coordinator told of it, so all before was leased
    all_leased = job.leases.leased_so_far() >= job.leases.target  # then nothing is left for a decision to govern
    if rate is not None and not (job.over or all_leased):
        frontier = job.leases.leased_so_far()
        decided = progress.decide(
            rate, call.decision, call.handled, frontier, between=call.between, planned=call.planned
        )
        if decided:
            job.decisions += 1
            job.add_event(f"{_in_words(decided)}: callbacks decided it after step {call.handled:,}")
    elif rate is not None and call.decision > progress.decided and call.handled < job.leases.target:
        job.warn(UNUSED_RATE, f"the learning rate {metric(rate)} came when every step was leased, and is not used")
    if call.stop_reason and job.state is JobState.RUNNING and progress.stopped_by is None and not all_leased:
        progress.stopped_by = call.handled
        job.decisions += 1
        job.stop_at_frontier(call.stop_reason)
    progress.handle(call.handled)
    progress.ends.want(call.wants_steps)
    target = job.leases.target
    ends, seen = progress.ends.since(call.steps_seen if call.coordinator == job.options.incarnation else 0)
    milestone = progress.reached(job.leases.lowest_incomplete, target)
    if len(ends) == ENDS_AT_ONCE:
        milestone = None  # it comes after its steps
    elif milestone is not None and job.awaits_reports and job.figures.missing_in(milestone.epochs):
        milestone = None  # a worker is about to report steps again that an earlier coordinator has not stored
    return FollowAnswer(
        job.options.incarnation,
        job.state,
        milestone,
        ends,
        seen,
        target,
        progress.rates[-1] if progress.rates else None,
        progress.stopped_by,
    )


def _in_words(rates: Sequence[DecidedRate]) -> str:
    """Say from which steps on the learning rate is what."""
    shown = [f"{metric(rate.learning_rate)} from step {rate.first_step:,} on" for rate in rates[:RATES_SHOWN]]
    more = len(rates) - len(shown)
    return f"the learning rate is {', '.join(shown)}" + (f" (and {more:,} more changes)" if more else "")
