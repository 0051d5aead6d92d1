"""A real Prometheus for tests: started on a free port, asked over HTTP, gone with the test. And its promtool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cluster_run import DEADLINE_S, eventually
from support.command_run import DIES_WITH_US, ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
ALERTS = [
    rule
    for path in RULES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed (Debian: apt-get install prometheus): NOT CHECKED"
)
needs_prometheus = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="prometheus is not installed (Debian: apt-get install it): NOT CHECKED"
)


def minutes_become_seconds(rules: str) -> str:
    """Return rules in which every duration is sixty times shorter: `for: 5m` is `for: 5s`, `[10m]` is `[10s]`."""
    return re.sub(r"(\bfor: \d+|\[\d+)m\b", r"\1s", rules)


def promtool(*arguments: object) -> None:
    """Run promtool in the root of the repository; what it finds wrong fails the test."""
    ran = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def named(name: str, labels: dict[str, str]) -> str:
    """Return a series as promtool reads it."""
    return f"{name}{{{', '.join(f'{label}={json.dumps(value)}' for label, value in labels.items())}}}"


def expressions_show(
    folder: Path, scraped: Iterable[tuple[str, str]], shown: Iterable[tuple[str, list[tuple[dict[str, str], float]]]]
) -> None:
    """Let promtool evaluate expressions after 10 minutes.

    Parameters
    ----------
    folder : Path
        Where its file is written.
    scraped : iterable
        Series, and their values minute by minute in promtool's notation.
    shown : iterable
        Expressions, and of each series that they return its labels and its value.
    """
    case = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in scraped],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": "10m",
                "exp_samples": [{"labels": named("", labels), "value": value} for labels, value in samples],
            }
            for expr, samples in shown
        ],
    }
    path = folder / "expressions.yml"
    path.write_text(json.dumps({"evaluation_interval": "1m", "tests": [case]}))
    promtool("test", "rules", path)


class PrometheusServer:
    """Prometheus with `deploy/prometheus/local.yml`, but sixty times faster rules and two scrapes a second."""

    def __init__(self, folder: Path) -> None:
        self.targets = folder / "targets.json"
        for path in RULES:
            (folder / path.name).write_text(minutes_become_seconds(path.read_text()))
        config = (PROMETHEUS / "local.yml").read_text()
        for old, new in (
            ("scrape_interval: 1s", "scrape_interval: 500ms"),
            ("evaluation_interval: 5s", "evaluation_interval: 500ms"),
            ("[rules/*.yml]", f"[{', '.join(str(folder / path.name) for path in RULES)}]"),
            ("../../runs/targets.json", str(self.targets)),
        ):
            assert old in config
            config = config.replace(old, new)
        (folder / "prometheus.yml").write_text(config)
        self._log = folder / "prometheus.log"
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*DIES_WITH_US, *command, "--web.listen-address=127.0.0.1:0"], stderr=log, stdout=log
            )
        self._address = eventually(self._listens, "Prometheus listens", told=self._log.read_text)
        eventually(self._ready, "Prometheus is ready", told=self._log.read_text)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series that an expression has now; an expression that is none fails the test."""
        parameters = urllib.parse.urlencode({"query": expr})
        try:
            answer = self._get(f"/api/v1/query?{parameters}")
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expr}: {error.read().decode()}")
        return list(json.loads(answer)["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        """Return every rule, with its health."""
        groups = json.loads(self._get("/api/v1/rules"))["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def told(self) -> str:
        """Return the state of every alert, for a failure."""
        return str([(series["metric"], series["value"]) for series in self.query("ALERTS")])

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        return {series["metric"]["alertname"] for series in self.query('ALERTS{alertstate="firing"}')}

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _listens(self) -> str:
        assert self._process.poll() is None, self._log.read_text()
        found = re.search(r'msg="Listening on" address=(\S+)', self._log.read_text())
        return found[1] if found else ""

    def _ready(self) -> bool:
        try:
            return bool(self._get("/-/ready"))
        except urllib.error.URLError:
            return False

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self._address}{path}", timeout=DEADLINE_S) as answer:
            return str(answer.read().decode())
