"""What the dashboards show: every panel, its expression and what to read from it.

Every series of ours is narrowed to the chosen runs by `of_run`, so expressions here leave that out. GPU panels but the
last read NVIDIA's dcgm-exporter.
"""

from __future__ import annotations

from deploy.grafana.layout import Dashboard, Kind, Panel, Query, of_run

WITH_ROLE = "* on (run, instance) group_left (role) parashard_build_info"
LEGENDS = {
    "run": "{{run}}",
    "shard": "shard {{shard}}",
    "worker": "{{worker}}",
    "phase": "{{phase}}",
    "result": "{{result}}",
    "reason": "{{reason}}",
    "role, reason": "{{role}} {{reason}}",
    "Hostname, gpu": "{{Hostname}} {{gpu}}",
}
"""What series by these labels are called."""


def panel(
    title: str, description: str, unit: str, *queries: tuple[str, str], kind: Kind = "lines", minimum: float | None = 0
) -> Panel:
    """Return a panel of (expression, legend) pairs."""
    return Panel(title, description, unit, tuple(Query(of_run(e), legend) for e, legend in queries), kind, minimum)


def highest(series: str, by: str = "run", *, legend: str = "") -> tuple[str, str]:
    """Return a query of the greatest value of each `by`; of a series that only one process has, its value."""
    return f"max by ({by}) ({series})", legend or LEGENDS[by]


def per_second(counter: str, by: str = "run", *, legend: str = "") -> tuple[str, str]:
    """Return a query of a counter's rise per second, over all of each `by`."""
    return f"sum by ({by}) (rate({counter}[$__rate_interval]))", legend or LEGENDS[by]


def in_5_minutes(counter: str, by: str = "run", *, legend: str = "") -> tuple[str, str]:
    """Return a query of a counter's rise in the last 5 minutes, over all of each `by`."""
    return f"sum by ({by}) (increase({counter}[5m]))", legend or LEGENDS[by]


def quantiles(histogram: str, by: str = "") -> list[tuple[str, str]]:
    """Return queries of the 50th, 95th and 99th percentile of a histogram, over all of `by`."""
    rate = f"sum by ({by}le) (rate({histogram}_bucket[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rate})", f"p{int(q * 100)}") for q in (0.5, 0.95, 0.99)]


OVERVIEW = Dashboard(
    "parashard-overview",
    "parashard / Overview",
    "Does the job get on, and is what it does worth anything?",
    (
        panel("Throughput", "Examples in steps that became complete.", "suffix: examples/s",
              per_second("parashard_coordinator_examples_total")),
        panel("Goodput", "How many more steps are complete, of those computed. The rest was done twice or lost.",
              "percentunit",
              ("clamp(sum by (run) (delta(parashard_coordinator_steps_complete[$__rate_interval])) / "
               "sum by (run) (increase(parashard_worker_computed_steps_total[$__rate_interval])), 0, 1)", "now"),
              ("run:parashard_goodput:ratio_rate5m", "over 5 minutes")),
        panel("Training loss", "Training loss, smoothed over steps.", "short",
              highest("parashard_coordinator_training_loss"), minimum=None),
        panel("Workers", "Live workers, and how many the launcher keeps running.", "short",
              highest("parashard_coordinator_workers_live", legend="live"),
              highest("parashard_coordinator_workers_wanted", legend="wanted")),
        panel("Steps complete", "Share of the job's steps that every shard has. It falls when a shard loses some.",
              "percentunit",
              ("max by (run) (parashard_coordinator_steps_complete) / max by (run) (parashard_coordinator_steps)",
               "{{run}}")),
        panel("Time without progress", "Since the last step became complete. It grows while a shard is away.", "s",
              ("time() - max by (run) (parashard_coordinator_last_progress_timestamp_seconds)", "{{run}}")),
        panel("Shards", "Shards that answer, and how many the plan has. The job waits for every one.", "short",
              highest("parashard_coordinator_shards_live", legend="live"),
              highest("parashard_coordinator_shards", legend="in the plan")),
        panel("State", "1 starting, 2 running, 3 draining, 4 done, 5 failed.", "short",
              highest("parashard_coordinator_job_state"), kind="stat"),
        panel("Processes", "Processes that Prometheus can scrape.", "short",
              ("count by (role) (parashard_build_info)", "{{role}}")),
    ),
)  # fmt: skip

STALENESS = Dashboard(
    "parashard-staleness",
    "parashard / Staleness",
    "How old are the weights that gradients were computed from?",
    (
        panel("Staleness of pushes", "How many pushes missed how many others, which the shard applied in between.",
              "suffix: pushes",
              ("sum by (le) (increase(parashard_shard_push_staleness_pushes_bucket[$__rate_interval]))", "{{le}}"),
              kind="heatmap"),
        panel("Percentiles of staleness", "About the lag in auto, and workers times (pipeline depth + 1) in async.",
              "suffix: pushes", *quantiles("parashard_shard_push_staleness_pushes")),
        panel("Staleness by worker", "Mean over the worker's pushes. A slow worker is stale, and so is its learning.",
              "suffix: pushes",
              ("sum by (worker) (rate(parashard_worker_staleness_pushes_total[$__rate_interval])) / "
               "sum by (worker) (rate(parashard_worker_steps_total[$__rate_interval]))", "{{worker}}")),
        panel("Greatest step lag", "Step minus the lowest step that the shard lacked, at an apply. No bound in async.",
              "suffix: steps",
              highest("parashard_shard_step_lag_max", "shard")),
        panel("Leases", "Steps that are leased now, and leases given a second time to pass a straggler.", "short",
              highest("parashard_coordinator_leases", legend="held"),
              ("sum by (run) (increase(parashard_coordinator_speculative_leases_total[$__rate_interval]))",
               "second leases")),
        panel("Waiting for a lease", "Share of each worker's time. But in async it is what consistency costs.",
              "percentunit",
              per_second('parashard_worker_phase_seconds_total{phase="lease"}', "worker")),
    ),
)  # fmt: skip

SHARDS = Dashboard(
    "parashard-shards",
    "parashard / Shards",
    "Which shard is the bottleneck, and what does it do?",
    (
        panel("Pushed", "Payload received in pushes.", "Bps",
              per_second("parashard_shard_push_bytes_total", "shard")),
        panel("Pulled", "Payload sent in pulls.", "Bps",
              per_second("parashard_shard_pull_bytes_total", "shard")),
        panel("Pushes", "By what became of them. Duplicates change nothing.", "suffix: pushes/s",
              per_second("parashard_shard_pushes_total", "result"), kind="stack"),
        panel("Apply time", "Duration of the requests that moved the weights, over all shards.", "s",
              *quantiles("parashard_shard_apply_seconds")),
        panel("Busy", "Share of the time with a request at work or in line: near 1 workers always wait for the shard.",
              "percentunit",
              per_second("parashard_shard_busy_seconds_total", "shard")),
        panel("Hot shard", "The busiest over the mean of all: 1 is balanced. Another partitioner may help.", "short",
              ("max(run_shard:parashard_shard_busy:ratio_rate5m) / avg(run_shard:parashard_shard_busy:ratio_rate5m)",
               "busiest / mean")),
        panel("Memory of the state", "Weights, the optimizer's slots, pushes that are being put together.", "bytes",
              ("sum(parashard_shard_variable_bytes)", "weights"), ("sum(parashard_shard_slot_bytes)", "slots"),
              ("sum(parashard_shard_queue_bytes)", "pushes"), kind="stack"),
        panel("Rows of embedding tables", "A shard that has its rows_max stops the job.", "short",
              ("sum by (table) (parashard_shard_table_rows)", "{{table}}"),
              ("sum by (table) (parashard_shard_table_candidates)", "{{table}}: keys without a row yet")),
        panel("Embedding tables: fullest shard", "Rows of those that it takes at most.", "percentunit",
              ("max by (table) (parashard_shard_table_rows / parashard_shard_table_rows_max)", "{{table}}")),
        panel("Rows that come and go", "Rows that are made and evicted. Evicting what comes back is work for nothing.",
              "suffix: rows/s",
              ("sum by (table) (rate(parashard_shard_table_added_rows_total[$__rate_interval]))", "{{table}} added"),
              ("sum by (table) (rate(parashard_shard_table_evicted_rows_total[$__rate_interval]))",
               "{{table}} evicted")),
        panel("Looked-up keys with a row", "The others have their first values: new keys, or ones without a row.",
              "percentunit",
              ("sum by (table) (rate(parashard_shard_table_pulled_rows_total[$__rate_interval])) / "
               "sum by (table) (rate(parashard_shard_table_pulled_keys_total[$__rate_interval]))", "{{table}}")),
        panel("Bytes of rows a step", "Keys and rows, keys and gradients as they travel.", "bytes",
              *(("sum by (table) (rate(parashard_shard_table_" + way + "_bytes_total[$__rate_interval])) / on () "
                 "group_left () sum(rate(parashard_worker_steps_total[$__rate_interval]))", "{{table}} " + way)
                for way in ("pulled", "pushed"))),
        panel("Resident memory", "As the system counts it; memory shared with workers is in both.", "bytes",
              ("max by (shard) (process_resident_memory_bytes * on (run, instance) group_left (shard) "
               "(parashard_shard_incarnation > bool 0))", "shard {{shard}}")),
        panel("Traffic saved", "Share of the payload that encodings and unmoved partitions saved.",
              "percentunit",
              ("1 - (sum(rate(parashard_shard_push_bytes_total[$__rate_interval])) "
               "+ sum(rate(parashard_shard_pull_bytes_total[$__rate_interval]))) "
               "/ (sum(rate(parashard_shard_push_float32_bytes_total[$__rate_interval])) "
               "+ sum(rate(parashard_shard_pull_bytes_total[$__rate_interval])) "
               "+ sum(rate(parashard_shard_pull_unmoved_bytes_total[$__rate_interval])))", "saved")),
    ),
)  # fmt: skip

WORKERS = Dashboard(
    "parashard-workers",
    "parashard / Workers",
    "Where does a worker's time go?",
    (
        panel("Phases", "Seconds per second, over all workers. Pull and push are only what did not overlap.", "s",
              per_second("parashard_worker_phase_seconds_total", "phase"),
              kind="stack"),
        panel("Computing", "Share of each worker's time. The rest is waiting.", "percentunit",
              per_second('parashard_worker_phase_seconds_total{phase="compute"}', "worker")),
        panel("Steps", "Steps that every shard acknowledged, by worker.", "suffix: steps/s",
              per_second("parashard_worker_steps_total", "worker")),
        panel("Network time overlapped", "Share of pulls and pushes that ran beside computing.", "percentunit",
              ('1 - sum by (worker) (rate(parashard_worker_phase_seconds_total{phase=~"pull|push"}[$__rate_interval])) '
               "/ sum by (worker) (rate(parashard_worker_transfer_seconds_total[$__rate_interval]))", "{{worker}}"),
              minimum=None),
        panel("Processor time", "Cores that the processes use, by role.", "short",
              (f"sum by (role) (rate(process_cpu_seconds_total[$__rate_interval]) {WITH_ROLE})", "{{role}}"),
              kind="stack"),
        panel("Resident memory", "Of each worker, as the system counts it.", "bytes",
              ("max by (worker) (process_resident_memory_bytes * on (run, instance) group_left (worker) "
               "(parashard_worker_steps_total >= bool 0))", "{{worker}}")),
    ),
)  # fmt: skip

FAILURES = Dashboard(
    "parashard-failures",
    "parashard / Failures and restarts",
    "What died, what did it cost, and who was told?",
    (
        panel("Restarts", "Processes that came again, in 5 minutes.", "short",
              in_5_minutes("parashard_coordinator_worker_restarts_total", legend="workers"),
              in_5_minutes("parashard_coordinator_shard_restarts_total", legend="shards")),
        panel("Incarnations of shards", "A shard's incarnation rises with each start.", "short",
              highest("parashard_shard_incarnation", "shard")),
        panel("Alerts", "That fire.", "short",
              ('count by (alertname) (ALERTS{alertname=~"Parashard.+", alertstate="firing"})', "{{alertname}}"),
              kind="stack"),
        panel("Computed and complete", "The difference was done twice, or lost. Below 0 a shard lost steps.",
              "suffix: steps/s",
              per_second("parashard_worker_computed_steps_total", legend="computed"),
              ("sum by (run) (deriv(parashard_coordinator_steps_complete[$__rate_interval]))", "complete"),
              minimum=None),
        panel("Pushes that do not count", "Share of each shard's pushes. Duplicates are safe and cost time.",
              "percentunit",
              ('sum by (shard) (rate(parashard_shard_pushes_total{result=~"duplicate|refused"}[$__rate_interval])) '
               "/ sum by (shard) (rate(parashard_shard_pushes_total[$__rate_interval]))", "shard {{shard}}")),
        panel("Given up and taken back", "In 5 minutes: steps pushed empty; returns of all shards to an earlier round; "
              "worker processes that ended.", "short",
              ("max by (run) (increase(parashard_shard_skipped_steps_total[5m]))", "steps given up"),
              in_5_minutes("parashard_coordinator_rollbacks_total", legend="rollbacks"),
              in_5_minutes("parashard_coordinator_worker_exits_total", legend="worker exits")),
        panel("Ends of pods", "In 5 minutes, of containers, too, by role and reason. On Kubernetes only.", "short",
              in_5_minutes("parashard_coordinator_pod_ends_total", "role, reason"), kind="stack"),
        panel("Refused peers", "What peers did not get in 5 minutes: beyond a cap, or too slow.", "short",
              in_5_minutes("parashard_refused_peers_total", "reason"), kind="stack"),
        panel("Certificates", "Time until the first one expires, by role. Without TLS there are none.", "s",
              ("min by (role) ((parashard_certificate_expires_timestamp_seconds - time()) "
               f"{WITH_ROLE})", "{{role}}"), minimum=None),
    ),
)  # fmt: skip

CHECKPOINTS = Dashboard(
    "parashard-checkpoints",
    "parashard / Checkpoints",
    "What would be lost now, and what does saving cost?",
    (
        panel("Age", "Since a shard's last checkpoint was stored: what a kill makes the workers compute again.", "s",
              ("max by (shard) (time() - parashard_shard_last_checkpoint_timestamp_seconds)", "shard {{shard}}"),
              highest("parashard_shard_checkpoint_interval_seconds", legend="interval asked for")),
        panel("Duration", "From the last one's cut until it was stored. Pushes go on meanwhile.", "s",
              highest("parashard_shard_checkpoint_seconds", "shard")),
        panel("Longest stall", "The longest that the copy of a partition kept pushes waiting, in this incarnation.",
        "s",
              highest("parashard_shard_checkpoint_stall_seconds", "shard")),
        panel("Size", "Of the last one.", "bytes",
              highest("parashard_shard_checkpoint_bytes", "shard")),
        panel("Stored and failed", "Checkpoints in 5 minutes.", "short",
              in_5_minutes("parashard_shard_checkpoints_total", legend="stored"),
              in_5_minutes("parashard_shard_failed_checkpoints_total", legend="failed")),
    ),
)  # fmt: skip

GPU = Dashboard(
    "parashard-gpu",
    "parashard / GPU",
    "What do the GPUs do? Mostly from NVIDIA's dcgm-exporter, which is not part of parashard.",
    (
        panel("Utilisation", "Share of the time in which a kernel ran.", "percent",
              highest("DCGM_FI_DEV_GPU_UTIL", "Hostname, gpu")),
        panel("Memory used", "Framebuffer.", "bytes",
              ("max by (Hostname, gpu) (DCGM_FI_DEV_FB_USED) * 1048576", LEGENDS["Hostname, gpu"])),
        panel("Power", "Drawn now.", "watt",
              highest("DCGM_FI_DEV_POWER_USAGE", "Hostname, gpu")),
        panel("Temperature", "Of the chip.", "celsius",
              highest("DCGM_FI_DEV_GPU_TEMP", "Hostname, gpu")),
        panel("Clock", "Of the streaming multiprocessors. It falls when the GPU is hot or short of power.", "hertz",
              ("max by (Hostname, gpu) (DCGM_FI_DEV_SM_CLOCK) * 1e6", LEGENDS["Hostname, gpu"])),
        panel("Xid errors", "The last error's number; 0 is none.", "short",
              highest("DCGM_FI_DEV_XID_ERRORS", "Hostname, gpu")),
        panel("Memory by worker", "Used on each worker's GPU, by all processes. From parashard.", "bytes",
              highest('parashard_worker_gpu_memory_bytes{memory="used"}', "worker")),
        panel("Copies by worker", "Between host and GPU, both ways. From parashard, as the next.", "Bps",
              per_second("parashard_worker_gpu_copied_bytes_total", "worker")),
        panel("Waiting for the GPU", "Share of a worker's computing. Near 0 the host is too slow, or the model waits.",
              "percentunit",
              ("sum by (worker) (rate(parashard_worker_gpu_wait_seconds_total[$__rate_interval])) / sum by (worker) "
               '(rate(parashard_worker_phase_seconds_total{phase="compute"}[$__rate_interval]))', "{{worker}}")),
    ),
)  # fmt: skip

DASHBOARDS = (OVERVIEW, STALENESS, SHARDS, WORKERS, FAILURES, CHECKPOINTS, GPU)
