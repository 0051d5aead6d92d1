"""The shard's Prometheus metrics, read from its record when they are scraped. The hot path updates no metric object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from parashard_server.core.shard import APPLY_BOUNDS_S, Shard, ShardCounters
from parashard_server.durability.checkpointer import CheckpointRecord
from parashard_server.push_memory import PushMemory
from parashard_server.shard_host import ShardHost
from parashard_server.state.rows.table_rows import TableRows

STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024)
"""The last one is above 8 * 127: `ParashardStalenessHigh` works for up to 127 workers."""


def shard_families(host: ShardHost, memory: PushMemory, saved: CheckpointRecord) -> Iterator[Metric]:
    """Yield every family: from the records of a shard, of the memory for its pushes and of its checkpoints."""
    index = str(host.shard.identity.shard)

    def counter(name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"parashard_shard_{name}", text, labels=["shard"])
        family.add_metric([index], value)
        return family

    def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"parashard_shard_{name}", text, labels=["shard"])
        family.add_metric([index], value)
        return family

    shard, record = host.shard, host.shard.record
    pushes = CounterMetricFamily("parashard_shard_pushes", "Pushes by result.", labels=["shard", "result"])
    for result, count in (
        ("applied", record.applied_pushes),
        ("buffered", record.buffered_pushes),
        ("duplicate", record.duplicate_pushes),
        ("refused", record.refused_pushes),
    ):
        pushes.add_metric([index, result], count)
    yield pushes
    yield counter("push_bytes", "Payload bytes received in pushes.", record.push_bytes)
    yield counter("push_float32_bytes", "Bytes of accepted pushes if all were float32.", record.push_float32_bytes)
    yield counter("pull_bytes", "Payload bytes sent in pulls.", record.pull_bytes)
    yield counter("pull_unmoved_bytes", "Bytes not sent in pulls, as unchanged.", record.pull_unmoved_bytes)
    yield counter("push_seconds", "Time spent processing pushes.", record.push_s)
    yield counter("pull_seconds", "Time spent answering pulls.", record.pull_s)
    yield counter("busy_seconds", "Time with a request running or queued.", host.lock.busy_s)
    yield counter("skipped_steps", "Skipped steps, pushed without a gradient.", record.skipped_steps)
    yield counter("failed_announcements", "Announcements that got an internal error.", record.failed_announcements)
    yield gauge("version", "Updates applied: pushes, in sync mode rounds.", shard.updates.version)
    yield gauge("steps_applied", "Steps in the applied set.", len(shard.updates.applied))
    yield gauge("step_lag_max", "Greatest step lag at an apply.", record.step_lag_max)
    yield gauge("variable_bytes", "Bytes of weights.", shard.storage.weights.nbytes)
    yield gauge("slot_bytes", "Bytes of optimizer slots.", shard.storage.slot_bytes)
    yield gauge("queue_bytes", "Memory held by pushes in progress.", memory.held_bytes)
    yield gauge("queue_budget_bytes", "Limit of that memory: cluster.queue_bytes.", memory.total_bytes)
    yield counter("queue_refusals", "Pushes and slots refused for lack of that memory.", memory.refused)
    yield gauge("incarnation", "Number of the shard's incarnation.", shard.identity.incarnation)
    yield counter("checkpoints", "Checkpoints stored.", saved.stored)
    yield counter("failed_checkpoints", "Checkpoints that could not be stored.", saved.failed)
    yield gauge("checkpoint_bytes", "Bytes of the last checkpoint.", saved.bytes)
    yield gauge("checkpoint_seconds", "Time from the last checkpoint's cut until it was stored.", saved.seconds)
    yield gauge("checkpoint_stall_seconds", "Longest time that a copy kept pushes waiting.", saved.stall_s)
    yield gauge("checkpoint_interval_seconds", "Configured interval; 0: not by time.", saved.interval_s)
    yield gauge("last_checkpoint_timestamp_seconds", "Unix time at which the last one was stored.", saved.stored_at_s)
    yield _staleness(record, index)
    yield _applies(record, index)
    yield from _tables(shard, index)


def _tables(shard: Shard, index: str) -> Iterator[Metric]:
    tables = shard.tables
    by_name = {} if tables is None else tables.by_name
    figures: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, Callable[[TableRows], int]], ...]
    figures = (
        (GaugeMetricFamily, "rows", "Rows of an embedding table.", lambda one: one.rows),
        (GaugeMetricFamily, "rows_max", "Maximum number of rows on this shard.", lambda one: one.table.rows_max),
        (GaugeMetricFamily, "bytes", "Memory of rows, slots and indexes.", lambda one: one.memory_bytes),
        (GaugeMetricFamily, "candidates", "Counted keys that have no row yet.", lambda one: one.counted_keys),
        (CounterMetricFamily, "added_rows", "Rows created.", lambda one: one.added_rows),
        (CounterMetricFamily, "evicted_rows", "Rows evicted by the rules.", lambda one: one.records.evicted),
        (CounterMetricFamily, "pulled_keys", "Keys requested in pulls.", lambda one: one.pulled_keys),
        (CounterMetricFamily, "pulled_rows", "Requested keys that had a row.", lambda one: one.pulled_rows),
        (CounterMetricFamily, "pulled_bytes", "Payload of row pulls and answers.", lambda one: one.pulled_bytes),
        (CounterMetricFamily, "pushed_bytes", "Payload of row gradients.", lambda one: one.pushed_bytes),
    )
    for kind, name, text, figure in figures:
        family = kind(f"parashard_shard_table_{name}", text, labels=["shard", "table"])
        for table, rows in by_name.items():
            family.add_metric([index, table], figure(rows))
        yield family


def _staleness(record: ShardCounters, index: str) -> HistogramMetricFamily:
    counts = dict(record.staleness)
    buckets = [
        (str(float(bound)), float(sum(n for staleness, n in counts.items() if staleness <= bound)))
        for bound in STALENESS_BUCKETS
    ]
    buckets.append(("+Inf", float(sum(counts.values()))))
    family = HistogramMetricFamily(
        "parashard_shard_push_staleness_pushes",
        "Pushes that the shard applied between a push's pull and the push.",
        labels=["shard"],
    )
    family.add_metric([index], buckets, sum_value=float(sum(s * n for s, n in counts.items())))
    return family


def _applies(record: ShardCounters, index: str) -> HistogramMetricFamily:
    bounds = [*map(str, APPLY_BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(record.applies)), strict=True))
    family = HistogramMetricFamily(
        "parashard_shard_apply_seconds", "Duration of requests that updated the weights.", labels=["shard"]
    )
    family.add_metric([index], buckets, sum_value=record.apply_s)
    return family
