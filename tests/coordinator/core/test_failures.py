"""What failed attempts mean: a model that cannot work stops the job at once, and a divergence is named (P6)."""

from __future__ import annotations

from typing import Any

from parashard_coordinator.core.calls import FailedStep, FailureKind, JobState
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.failures import GIVEN_UP_IN_A_ROW_MAX
from parashard_coordinator.core.supervision import CONFIGURATION, FAILED
from support.coordinator_cases import Caller, core_of, done

RAISES = "model.py:31: KeyError: 'w'"
DIVERGED = "training diverged: loss became NaN at step 1; lower optimizer.learning_rate or set optimizer.clip_norm"


def attempt(caller: Caller, reason: str, kind: FailureKind, **report: Any) -> int:
    """Lease a step, fail at it, and return it."""
    [step] = caller.lease(1)
    caller.call(failed=[FailedStep(step, reason.replace("STEP", str(step)), kind)], **report)
    return step


def ended(core: Core) -> tuple[str, int]:
    assert core.job.state is JobState.FAILED
    return core.job.reason, core.job.exit_code


def test_a_result_that_fits_no_variable_stops_the_job_at_once() -> None:
    core = core_of(skip_bad_steps=True)
    wrong = "model.py:12: the gradient of 'w' has shape (3,), the variable has (4,)"
    attempt(Caller(core), wrong, FailureKind.WRONG_RESULT)
    assert ended(core) == (wrong, CONFIGURATION)


def test_a_model_that_raises_at_every_step_stops_the_job_before_any_step_is_given_up() -> None:
    core = core_of(retry_pause_s=1.0, skip_bad_steps=True)
    caller = Caller(core)
    assert [attempt(caller, RAISES, FailureKind.MODEL) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert ended(core) == (f"guest-0: {RAISES}; the first 5 attempts at steps all failed", CONFIGURATION)


def test_one_bad_step_at_the_very_beginning_is_skipped_like_any_other() -> None:
    core = core_of(skip_bad_steps=True)
    caller = Caller(core)
    assert [attempt(caller, RAISES, FailureKind.MODEL) for _ in range(5)] == [0] * 5
    assert core.job.state is JobState.RUNNING
    caller.call(want=1)
    caller.complete_all()
    assert core.job.events[-1] == f"warning: step 0 is skipped after 5 attempts: {RAISES}"


def test_once_a_step_has_succeeded_others_that_fail_are_bad_steps() -> None:
    core = core_of(retry_pause_s=1.0)
    caller = Caller(core)
    caller.lease(1)
    caller.complete_all()
    for _ in range(12):
        attempt(caller, RAISES, FailureKind.MODEL)
    assert core.job.state is JobState.RUNNING


def test_a_bad_step_that_stops_the_job_is_the_user_s_error_if_the_model_raised() -> None:
    for kind, where, code in ((FailureKind.MODEL, "guest-0: ", CONFIGURATION), (FailureKind.OTHER, "", FAILED)):
        core = core_of(max_attempts=2)
        caller = Caller(core)
        for _ in range(2):
            attempt(caller, RAISES, kind)
        assert ended(core) == (f"{where}{RAISES}; step 0 failed 2 times", code)


def test_where_only_skips_are_left_the_job_stops() -> None:
    core = core_of(max_attempts=1, skip_bad_steps=True)
    caller = Caller(core)
    caller.lease(1)
    caller.complete_all()
    for i in range(GIVEN_UP_IN_A_ROW_MAX):
        assert core.job.state is JobState.RUNNING
        attempt(caller, "loss became NaN at step STEP", FailureKind.NOT_FINITE)
        if i < GIVEN_UP_IN_A_ROW_MAX - 1:
            [step] = caller.lease(1)
            caller.call(completed=done(step, skipped=True))
    reason, code = ended(core)
    assert reason.startswith("training diverged: loss became NaN at step 10; lower ")
    assert "; 10 steps in a row were given up" in reason
    assert code == FAILED


def test_a_step_that_succeeds_between_begins_the_count_of_skips_anew() -> None:
    core = core_of(max_attempts=1, skip_bad_steps=True)
    caller = Caller(core)
    for _ in range(GIVEN_UP_IN_A_ROW_MAX + 2):
        attempt(caller, "NaN", FailureKind.NOT_FINITE)
        [skipped] = caller.lease(1)
        [good] = caller.lease(1, completed=done(skipped, skipped=True))
        caller.call(completed=done(good))
    assert core.job.state is JobState.RUNNING


def test_a_loss_that_is_not_finite_after_others_that_were_is_a_divergence() -> None:
    core = core_of(max_attempts=2, examples_of=lambda step: " (examples 3, 5)")
    caller = Caller(core)
    caller.lease(1)
    caller.complete_all()
    for _ in range(2):
        attempt(caller, "loss became NaN at step STEP", FailureKind.NOT_FINITE)
    assert ended(core) == (f"{DIVERGED}; step 1 failed 2 times (examples 3, 5)", FAILED)


def test_a_loss_that_is_not_finite_at_the_first_weights_is_none() -> None:
    core = core_of(max_attempts=1)
    attempt(Caller(core), "loss became NaN at step STEP", FailureKind.NOT_FINITE)
    assert core.job.reason == (
        "loss became NaN at step 0, and no step was in before it; check the model and its first values; "
        "step 0 failed once"
    )


def test_one_step_that_is_not_finite_while_others_succeed_is_no_divergence() -> None:
    core = core_of(max_attempts=3, examples_of=lambda step: " (examples 3, 5)")
    bad, others = Caller(core), Caller(core)
    others.lease(1)
    others.complete_all()
    failed = [FailedStep(1, "the gradient of 'w' became NaN at step 1", FailureKind.NOT_FINITE)]
    assert bad.lease(1) == [1]
    for _ in range(2):
        assert bad.lease(1, failed=failed) == [1]
        others.lease(1)
        others.complete_all()
    bad.call(failed=failed)
    reason, code = ended(core)
    assert reason == (
        "the gradient of 'w' became NaN at step 1, while other steps succeed; check its examples and what the model "
        "makes of them; step 1 failed 3 times (examples 3, 5)"
    )
    assert code == FAILED


def test_several_steps_that_are_not_finite_are_a_divergence_though_late_ones_succeed() -> None:
    core = core_of(max_attempts=2, retry_pause_s=1.0)
    bad, late = Caller(core), Caller(core)
    late.lease(1)
    late.complete_all(want=2)
    attempt(bad, "loss became NaN at step STEP", FailureKind.NOT_FINITE)
    late.complete_all()
    attempt(bad, "loss became NaN at step STEP", FailureKind.NOT_FINITE)
    [again] = bad.lease(1, now_s=2.0)
    bad.call(2.0, failed=[FailedStep(again, "loss became NaN", FailureKind.NOT_FINITE)])
    assert ended(core)[0].startswith("training diverged: loss became NaN; lower ")
