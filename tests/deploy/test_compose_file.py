"""The compose file: it restricts every service, is valid for compose's own parser, and its overrides fit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "deploy" / "compose" / "compose.yaml"
PROFILES = ("gpu", "monitoring")
OURS = {"coordinator", "shard-0", "shard-1", "worker", "gpu-worker"}
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]

needs_docker_compose = pytest.mark.skipif(
    not shutil.which("docker-compose"), reason="needs docker-compose: NOT CHECKED"
)


def composed(*arguments: str, more_files: tuple[Path, ...] = ()) -> str:
    """Return what docker-compose, Debian's 1.29 or newer, says to a command about the file and others over it."""
    files = [word for path in (COMPOSE_FILE, *more_files) for word in ("--file", str(path))]
    ran = subprocess.run(
        ["docker-compose", *files, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def with_profiles() -> list[str]:
    return [word for profile in PROFILES for word in ("--profile", profile)]


@pytest.mark.full("by podman-compose; its texts are compared here")
@needs_docker_compose
def test_it_is_valid_with_every_profile_and_without_one():
    assert set(composed(*with_profiles(), "config", "--services").split()) == set(SERVICES)
    assert set(composed("config", "--services").split()) >= OURS - {"gpu-worker"}


def test_every_service_is_restricted():
    assert set(SERVICES) == OURS | {"certificates", "prometheus", "grafana"}
    for name, service in SERVICES.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["restart"].startswith("no" if name == "certificates" else "on-failure"), name
        assert "privileged" not in service, name


def test_what_is_published_is_published_on_loopback_only():
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(published) == 3
    assert all(str(port).startswith("127.0.0.1:") for port in published), json.dumps(published)


def test_each_shard_listens_under_its_own_name_and_prometheus_finds_all_of_them():
    for index in (0, 1):
        shard = SERVICES[f"shard-{index}"]
        assert {f"--index={index}", f"--host=shard-{index}"} <= set(shard["command"])
        assert shard["hostname"] == f"shard-{index}"
        assert shard["networks"]["training"]["aliases"] == ["shard"]
    for name in OURS:
        assert "--http-port=9100" in SERVICES[name]["command"], name


def test_each_service_has_its_own_certificate_and_only_that():
    for name in OURS:
        assert "--tls-dir=/tls" in SERVICES[name]["command"], name
        assert "--insecure" not in SERVICES[name]["command"], name
        mounted = {volume.partition(":")[0] for volume in SERVICES[name]["volumes"] if volume.startswith("tls-")}
        own = f"tls-{name.removeprefix('gpu-')}"
        assert mounted == ({own, "tls-operator"} if name == "coordinator" else {own}), name
    assert SERVICES["certificates"]["network_mode"] == "none"


def test_who_needs_the_coordinator_starts_once_it_is_healthy():
    certificates = {"certificates": {"condition": "service_completed_successfully"}}
    assert SERVICES["coordinator"]["depends_on"] == certificates
    for name in OURS - {"coordinator"}:
        assert SERVICES[name]["depends_on"] == {"coordinator": {"condition": "service_healthy"}}, name
    for name in OURS:
        assert SERVICES[name]["healthcheck"]["test"][:3] == ["CMD", "parashard", "health"], name
        assert SERVICES[name]["stop_grace_period"] == "15s", name


@needs_docker_compose
def test_the_override_for_traces_is_of_services_that_there_are_and_reaches_its_collector(tmp_path: Path):
    page = (COMPOSE_FILE.parents[2] / "docs" / "tracing.md").read_text()
    (override,) = re.findall(r"^```yaml\n(# docker compose .*?)^```$", page, re.M | re.S)
    (tmp_path / "trace.yaml").write_text(override)
    text = composed(*with_profiles(), "config", more_files=(tmp_path / "trace.yaml",))
    traced = yaml.safe_load(text)["services"]
    assert set(traced) == set(SERVICES) | {"collector"}
    for name in OURS:
        environment = SERVICES[name].get("environment", {})
        added = {"PARASHARD_TRACE": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
        assert traced[name]["environment"] == environment | added, name
        assert set(traced[name]["networks"]) == set(traced["collector"]["networks"]) == {"training"}, name
