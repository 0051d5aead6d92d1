"""The shard's metrics: families that Prometheus can read, with the record's numbers in them."""

import pytest

from parashard.plan.optimizers import Adam
from parashard.plan.variables import Variable
from parashard_server.core.shard import APPLY_BOUNDS_S, Shard, ShardCounters
from parashard_server.durability.checkpointer import CheckpointRecord
from parashard_server.metrics import STALENESS_BUCKETS, shard_families
from parashard_server.push_memory import PushMemory
from parashard_server.shard_host import AdmissionLock, ShardHost
from support.in_process import plan_of, pull, push, push_for, shard_of, variables_of
from support.shown_metrics import shown_families


def scraped(
    shard: Shard, saved: CheckpointRecord | None = None, memory: PushMemory | None = None
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return {(sample, labels but the shard's): value}."""
    host = ShardHost(shard, AdmissionLock(1), "")
    samples = {}
    for family in shown_families(shard_families(host, memory or PushMemory(1 << 20), saved or CheckpointRecord())):
        assert family.documentation
        for sample in family.samples:
            assert sample.name.startswith("parashard_shard_")
            labels = dict(sample.labels)
            assert labels.pop("shard") == "0"
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return samples


def small_shard() -> Shard:
    return shard_of(plan_of(variables_of(Variable("w", (4,)))), spec=Adam())


def test_pushes_are_reported_by_result() -> None:
    shard = small_shard()
    push(shard, 0, 1.0)
    push(shard, 0, 1.0)
    shard.push(push_for(shard, 1, [], slices=(), skipped=True))
    pull(shard)
    samples = scraped(shard)
    results = {dict(labels)["result"]: n for (name, labels), n in samples.items() if name.endswith("pushes_total")}
    assert results == {"applied": 2, "buffered": 0, "duplicate": 1, "refused": 0}
    assert {
        name.removeprefix("parashard_shard_"): value
        for (name, labels), value in samples.items()
        if not labels and not any(part in name for part in ("staleness", "seconds", "checkpoint"))
    } == {
        "push_bytes_total": 32,
        "push_float32_bytes_total": 32,
        "pull_bytes_total": 16,
        "pull_unmoved_bytes_total": 0,
        "skipped_steps_total": 1,
        "failed_announcements_total": 0,
        "version": 2,
        "steps_applied": 2,
        "step_lag_max": 0,
        "variable_bytes": 16,
        "slot_bytes": 32,
        "queue_bytes": 0,
        "queue_budget_bytes": 1 << 20,
        "queue_refusals_total": 0,
        "incarnation": 1,
    }


def test_checkpoints_are_counted() -> None:
    saved = CheckpointRecord(
        stored=3, failed=2, error="no space left", bytes=480, seconds=0.5, stall_s=0.25, interval_s=30, stored_at_s=1e9
    )
    shown = {name: value for (name, _), value in scraped(small_shard(), saved).items() if "checkpoint" in name}
    assert shown == {
        "parashard_shard_checkpoints_total": 3,
        "parashard_shard_failed_checkpoints_total": 2,
        "parashard_shard_checkpoint_bytes": 480,
        "parashard_shard_checkpoint_seconds": 0.5,
        "parashard_shard_checkpoint_stall_seconds": 0.25,
        "parashard_shard_checkpoint_interval_seconds": 30,
        "parashard_shard_last_checkpoint_timestamp_seconds": 1e9,
    }


def test_the_histogram_is_cumulative_and_ends_with_its_count() -> None:
    shard = small_shard()
    for staleness in (0, 0, 1, 5, 128, 129, 5000):
        shard.record.saw_staleness(staleness)
    shard.record.saw_staleness(None)
    samples = scraped(shard)
    name = "parashard_shard_push_staleness_pushes"
    buckets = {float(dict(labels)["le"]): n for (sample, labels), n in samples.items() if sample == f"{name}_bucket"}
    assert list(buckets) == [*map(float, STALENESS_BUCKETS), float("inf")]
    assert list(buckets.values()) == sorted(buckets.values())
    shown = [buckets[bound] for bound in (0, 1, 4, 6, 128, 256, 1024, float("inf"))]
    assert shown == [2, 3, 3, 4, 5, 6, 6, 7]
    assert samples[f"{name}_count", ()] == 7
    assert samples[f"{name}_sum", ()] == 0 + 0 + 1 + 5 + 128 + 129 + 4095


def test_apply_times_fall_into_buckets_by_their_upper_bound() -> None:
    shard = small_shard()
    for seconds in (0.00005, 0.0001, 0.00011, 1.0, 60.0):
        shard.record.applied_in(seconds)
    samples = scraped(shard)
    name = "parashard_shard_apply_seconds"
    buckets = {float(dict(labels)["le"]): n for (sample, labels), n in samples.items() if sample == f"{name}_bucket"}
    assert list(buckets) == [*APPLY_BOUNDS_S, float("inf")]
    assert (buckets[0.0001], buckets[0.00025], buckets[0.5], buckets[1.0], buckets[2.5]) == (2, 3, 3, 4, 4)
    assert (samples[f"{name}_count", ()], buckets[float("inf")]) == (5, 5)
    assert samples[f"{name}_sum", ()] == pytest.approx(61.00026)


def test_no_label_grows_with_the_job() -> None:
    few, many = small_shard(), small_shard()
    for step in range(30):
        push(many, step, 1.0, pulled_version=step // 2)
    assert scraped(few).keys() == scraped(many).keys()


def test_the_record_counts_unknown_staleness_apart() -> None:
    record = ShardCounters()
    for staleness in (None, 0, 4095, 4096, 10**9):
        record.saw_staleness(staleness)
    assert (record.unknown_staleness, dict(record.staleness)) == (1, {0: 1, 4095: 3})
