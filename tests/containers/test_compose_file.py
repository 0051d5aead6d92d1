"""The compose file by compose's own parser: it is valid in every profile, and restricts every service."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from composed_job import COMPOSE_FILE
from container_engine import run

PROFILES = ("gpu", "monitoring")
OURS = {"coordinator", "shard-0", "shard-1", "worker", "gpu-worker"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """Return all services, as docker-compose (Debian's 1.29 or newer) understands the file."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with podman-compose, which is not installed")
    profiles = [word for profile in PROFILES for word in ("--profile", profile)]
    text = run("docker-compose", "--file", str(COMPOSE_FILE), *profiles, "config")
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def test_it_is_valid_without_a_profile_too(services):
    shown = run("docker-compose", "--file", str(COMPOSE_FILE), "config", "--services")
    assert set(shown.split()) >= OURS - {"gpu-worker"}
    assert set(services) == OURS | {"certificates", "prometheus", "grafana"}


def test_every_service_is_restricted(services):
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["restart"].startswith("no" if name == "certificates" else "on-failure"), name
        assert "privileged" not in service, name


def test_what_is_published_is_published_on_loopback_only(services):
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert len(published) == 3
    assert all(str(port).startswith("127.0.0.1:") for port in published), json.dumps(published)


def test_each_shard_listens_under_its_own_name_and_prometheus_finds_all_of_them(services):
    for index in (0, 1):
        shard = services[f"shard-{index}"]
        assert {f"--index={index}", f"--host=shard-{index}"} <= set(shard["command"])
        assert shard["hostname"] == f"shard-{index}"
        assert shard["networks"]["training"]["aliases"] == ["shard"]
    for name in OURS:
        assert "--http-port=9100" in services[name]["command"], name


def test_each_service_has_its_own_certificate_and_only_that(services):
    for name in OURS:
        assert "--tls-dir=/tls" in services[name]["command"], name
        assert "--insecure" not in services[name]["command"], name
        mounted = {volume.partition(":")[0] for volume in services[name]["volumes"] if volume.startswith("tls-")}
        own = f"tls-{name.removeprefix('gpu-')}"
        assert mounted == ({own, "tls-operator"} if name == "coordinator" else {own}), name
    assert services["certificates"]["network_mode"] == "none"


def test_who_needs_the_coordinator_starts_once_it_is_healthy(services):
    certificates = {"certificates": {"condition": "service_completed_successfully"}}
    assert services["coordinator"]["depends_on"] == certificates
    for name in OURS - {"coordinator"}:
        assert services[name]["depends_on"] == {"coordinator": {"condition": "service_healthy"}}, name
    for name in OURS:
        assert services[name]["healthcheck"]["test"][:3] == ["CMD", "parashard", "health"], name
        assert services[name]["stop_grace_period"] == "15s", name


def test_the_override_for_traces_is_of_services_that_there_are_and_reaches_its_collector(services, tmp_path: Path):
    page = (COMPOSE_FILE.parents[2] / "docs" / "tracing.md").read_text()
    (override,) = re.findall(r"^```yaml\n(# docker compose .*?)^```$", page, re.M | re.S)
    (tmp_path / "trace.yaml").write_text(override)
    files = ("--file", str(COMPOSE_FILE), "--file", str(tmp_path / "trace.yaml"))
    text = run("docker-compose", *files, "--profile", "gpu", "--profile", "monitoring", "config")
    traced = pytest.importorskip("yaml").safe_load(text)["services"]
    assert set(traced) == set(services) | {"collector"}
    for name in OURS:
        environment = services[name].get("environment", {})
        added = {"PARASHARD_TRACE": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
        assert traced[name]["environment"] == environment | added, name
        assert set(traced[name]["networks"]) == set(traced["collector"]["networks"]) == {"training"}, name
