"""A real Prometheus over a real training run: every panel and rule has data, and alerts fire for their causes.

Rules run sixty times faster than they are (`minutes_become_seconds`); nothing else about them is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.grafana.contents import DASHBOARDS, GPU
from deploy.grafana.layout import queries_of
from parashard.security.identity import Role
from support.certificates import Certificates
from support.cluster_run import ENDLESS, ClusterRun, eventually, sets
from support.prometheus_server import RULES, needs_prometheus
from support.watched_run import Watched, watch

pytestmark = [
    pytest.mark.xdist_group("more clusters"),
    pytest.mark.timeout(900),
    pytest.mark.full("a real Prometheus over real runs; `promtool` plays the alerts in test_prometheus_rules.py"),
    needs_prometheus,
]

SHARDS, WORKERS = 2, 2
OF_GPUS = {where for where, _ in queries_of([GPU])}
OF_TABLES = "parashard_shard_table_"  # this job has none: test_metrics_document.py has their names
OF_ALERTS = "parashard-failures: Alerts"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Path:
    """Return the folder of the run's certificates: within TLS, so that there are certificates to be watched."""
    folder: Path = tmp_path_factory.mktemp("watched") / "tls"
    certificates.renew(folder, list(Role), valid_days=30)
    return folder


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, tls: Path) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("monitoring")
    settings = sets(
        job__epochs=ENDLESS,
        cluster__shards=SHARDS,
        cluster__workers=WORKERS,
        cluster__lease_ttl_s=1.0,
        cluster__restart_backoff_s=0,
        cluster__max_restarts=1000,
        checkpoint__every_s=1.0,
    )
    with watch(folder, ["examples/digits.toml", *settings], tls) as watched:
        yield watched


def until_all_have(evaluate: Callable[[str], object], expressions: dict[str, str]) -> None:
    """Wait until every expression has returned data, each at some moment."""
    silent = dict(expressions)

    def look() -> bool:
        for name, expr in list(silent.items()):
            if evaluate(expr):
                del silent[name]
        return not silent

    eventually(look, "every expression has data", told=lambda: silent)


def test_every_panel_has_data_but_those_of_gpus_and_tables(watched: Watched) -> None:
    panels = {
        f"{where} #{place}": expr
        for place, (where, expr) in enumerate(queries_of(DASHBOARDS))
        if where not in OF_GPUS and where != OF_ALERTS and OF_TABLES not in expr
    }
    assert len(panels) > 40
    until_all_have(watched.evaluated, panels)


def test_every_recording_rule_has_data_and_every_series_that_an_alert_names(watched: Watched) -> None:
    rules = watched.prometheus.rules()
    recorded = {rule["name"]: rule["query"] for rule in rules if rule["type"] == "recording"}
    alerts = {rule["name"]: rule["query"] for rule in rules if rule["type"] == "alerting"}
    written = "".join(path.read_text() for path in RULES)
    assert (len(recorded), len(alerts)) == (written.count("- record: "), written.count("- alert: "))
    series = {
        f"{alert}: {found}": found
        for alert, query in alerts.items()
        for found in re.findall(r"\b(?:\w+:)?parashard_[\w:]+(?:\{[^}]*\})?", query)
    }
    until_all_have(watched.prometheus.query, {name: name for name in recorded} | recorded | series)
    assert {rule["health"] for rule in watched.prometheus.rules()} == {"ok"}


def test_a_certificate_that_ends_soon_raises_its_alert_until_it_is_renewed(
    watched: Watched, tls: Path, certificates: Certificates
) -> None:
    (panel,) = (expr for where, expr in queries_of(DASHBOARDS) if where == "parashard-failures: Certificates")

    def every_role_tells() -> bool:
        return {series["metric"]["role"] for series in watched.evaluated(panel)} == {"coordinator", "shard", "worker"}

    watched.until(every_role_tells, "every role tells when its certificate ends")
    watched.expect_quiet("ParashardCertificateExpiresSoon")
    certificates.renew(tls, list(Role), valid_days=2)
    watched.expect_firing("ParashardCertificateExpiresSoon")
    certificates.renew(tls, list(Role), valid_days=30)
    watched.expect_quiet("ParashardCertificateExpiresSoon")


def test_killed_workers_raise_the_alert_of_restarts(watched: Watched) -> None:
    watched.expect_quiet("ParashardWorkersRestarting")

    def kill_every_new_incarnation() -> bool:  # over two for each worker, within the time that the rule looks back
        for index in range(WORKERS):
            kill_next_incarnation(watched.run, "worker", f"worker-{index}")
        return "ParashardWorkersRestarting" in watched.prometheus.firing()

    watched.until(kill_every_new_incarnation, "ParashardWorkersRestarting fires")
    until_all_have(watched.evaluated, {where: expr for where, expr in queries_of(DASHBOARDS) if where == OF_ALERTS})


def test_killed_shards_raise_the_alert_of_restarts(watched: Watched) -> None:
    watched.expect_quiet("ParashardShardsRestarting")
    killed = dict.fromkeys(range(SHARDS), 0)

    def kill_every_new_incarnation() -> bool:
        for shard in killed:
            if (present := watched.incarnation(shard)) > killed[shard]:
                watched.run.kill("shard", str(shard))
                killed[shard] = present
        return "ParashardShardsRestarting" in watched.prometheus.firing()

    watched.until(kill_every_new_incarnation, "ParashardShardsRestarting fires")


def test_a_shard_and_a_worker_that_hang_are_missed_and_the_job_stands_still(watched: Watched) -> None:
    expected = ("ParashardShardDown", "ParashardNoProgress", "ParashardWorkersMissing")
    watched.expect_quiet(*expected)
    with watched.stopped("shard", "1"), watched.stopped("worker", "worker-0"):
        watched.expect_firing(*expected)
    watched.expect_quiet(*expected)


def test_a_coordinator_that_hangs_is_missed(watched: Watched) -> None:
    watched.expect_quiet("ParashardCoordinatorDown")
    with watched.stopped("coordinator", "coordinator"):
        watched.expect_firing("ParashardCoordinatorDown")
    watched.expect_quiet("ParashardCoordinatorDown")


def test_a_shard_that_can_store_nothing_says_so(watched: Watched) -> None:
    expected = ("ParashardCheckpointsFailing", "ParashardCheckpointOld")
    watched.expect_quiet(*expected)
    store = watched.run.dir / "checkpoints"
    with file_in_the_place_of(watched, store / "shards"):
        watched.expect_firing(*expected)
    watched.expect_quiet(*expected)


@contextmanager
def file_in_the_place_of(watched: Watched, parent: Path) -> Iterator[None]:
    """Take shard 1's folder away and put a file there: that stops even root, whom no permission does."""
    folder, aside = parent / "p0001" / "s0001", parent / "aside"
    eventually(folder.exists, "there is a folder, since the first checkpoint")
    with watched.stopped("shard", "1"):
        folder.rename(aside)
        folder.write_text("in the way")
    try:
        yield
    finally:
        with watched.stopped("shard", "1"):
            folder.unlink()
            aside.rename(folder)


def kill_next_incarnation(run: ClusterRun, module: str, label: str) -> None:
    """Kill a process and wait until another has its place."""
    before = eventually(lambda: run.pids(module).get(label), f"{label} runs", told=run.told)
    run.kill(module, label)
    eventually(lambda: run.pids(module).get(label, before) != before, f"{label} runs again", told=run.told)
