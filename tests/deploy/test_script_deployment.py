"""deploy/script: compose and Kubernetes run a script alike, restricted, inside mutual TLS, at the ports that it has."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from parashard.cli.main import app
from parashard.job.sections import ClusterOptions
from parashard.security.credentials import load
from parashard.security.identity import Role
from support.issued_secrets import Issuing, mount, secret_volumes
from support.k8s_manifests import ROOT, Manifest, kustomized, of_kind, pod_templates, pods
from support.k8s_reach import Peer, reach
from support.k8s_schemas import assert_valid
from support.waiting import DEADLINE_S

SCRIPT = ROOT / "deploy" / "script"
COMPOSE_FILE = SCRIPT / "compose.yaml"
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
PORT = 7100
SHARDS = 2


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return kustomized(SCRIPT / "k8s")


# --- compose ---


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="needs docker-compose: NOT CHECKED")
def test_the_compose_file_is_valid():
    command = ["docker-compose", "--file", str(COMPOSE_FILE), "config", "--services"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.split()) == {"certificates", "train", "worker"} == set(SERVICES)


def test_every_service_is_restricted_and_sees_its_own_certificate_only():
    for name, service in SERVICES.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["restart"].startswith("no" if name == "certificates" else "on-failure"), name
    mounted = {name: {v for v in service["volumes"] if "tls-" in v} for name, service in SERVICES.items()}
    assert mounted["train"] == {"tls-train:/tls:ro"}
    assert mounted["worker"] == {"tls-worker:/tls:ro"}
    assert SERVICES["certificates"]["network_mode"] == "none"
    (published,) = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published.startswith("127.0.0.1:")
    assert published.endswith(f":{PORT + 1}")


def test_the_commands_of_the_certificates_make_what_is_mounted(tmp_path: Path):
    words = [word.replace("/authority", str(tmp_path / "ca")) for word in SERVICES["certificates"]["command"]]
    words = [word.replace("/tls", str(tmp_path / "tls")) for word in words]
    ran = CliRunner().invoke(app, words[1:])
    assert ran.exit_code == 0, ran.output
    assert {path.name for path in (tmp_path / "tls").iterdir()} == {"train", "worker"}


# --- both ---


def environment(pod: Manifest) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pod["containers"][0]["env"] if "value" in one}


def test_the_script_is_placed_alike(manifests: list[Manifest]):
    found = environment(pods(manifests)["train"])
    assert found == SERVICES["train"]["environment"]
    assert found["PARASHARD_CLUSTER__PORT"] == str(PORT)


def joining(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments that `parashard worker` gives to its script."""
    told: list[dict[str, str]] = []

    def become(path: str, words: list[str], environ: dict[str, str]) -> None:
        told.append(environ)
        raise SystemExit(0)

    monkeypatch.setattr("os.execve", become)
    assert words[:2] == ["parashard", "worker"]
    ran = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    found: list[str] = json.loads(told[0]["PARASHARD_WORKER_ARGUMENTS"])
    return found


def test_the_workers_commands_are_of_this_version(manifests, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    composed = SERVICES["worker"]["command"][2].removeprefix("exec ")
    composed = composed.replace("${PARASHARD_GIVE_UP_S:-600}", "600").replace(
        "${PARASHARD_SCRIPT:-digits_layers.py}", "train.py"
    )
    by_compose = joining(composed.split(), monkeypatch)
    by_kubernetes = joining(pods(manifests)["worker"]["containers"][0]["args"], monkeypatch)
    for told in (by_compose, by_kubernetes):
        assert told[told.index("--connect") + 1] == f"train:{PORT}"
        assert told[told.index("--tls-dir") + 1] == "/tls"
    assert "--give-up-s 600.0" in " ".join(by_compose), "it ends when the script is gone"
    assert "--stopped-exit-code 75" in " ".join(by_kubernetes), "its index is not complete when its pod is taken away"


# --- Kubernetes ---


def test_every_manifest_is_valid_for_the_last_minors_of_kubernetes(manifests):
    for manifest in manifests:
        assert_valid(manifest)


def test_every_pod_is_restricted_and_has_no_key_to_the_api(manifests):
    for template in pod_templates(manifests):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod["initContainers"], *pod["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_the_script_listens_under_the_name_that_its_service_and_its_certificate_have(manifests):
    pod = pods(manifests)["train"]
    (service,) = of_kind(manifests, "Service")
    (template,) = (one for one in pod_templates(manifests) if one["spec"] == pod)
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    name = environment(pod)["PARASHARD_CLUSTER__HOST"]
    assert name == service["metadata"]["name"] == pod["hostname"] == pod["subdomain"]
    (certificate,) = (one for one in of_kind(manifests, "Certificate") if one["metadata"]["name"] == "train")
    assert certificate["spec"]["dnsNames"] == [name]


def test_the_secrets_have_the_roles(manifests, tmp_path):
    issuing = Issuing(manifests)
    roles = {}
    for name, pod in pods(manifests).items():
        (volume,) = secret_volumes(pod).values()
        folder = mount(volume, issuing.secret(volume["secretName"]), tmp_path / name)
        roles[name] = {identity.role for identity in load(folder).identities}
    own = {Role.COORDINATOR, Role.SHARD, Role.WORKER, Role.OPERATOR}
    assert roles == {"train": own, "worker": {Role.WORKER}}


def test_workers_reach_the_ports_of_the_coordinator_and_the_shards_and_nobody_else_does(manifests):
    options = ClusterOptions(shards=SHARDS, port=PORT)
    data = {port for index in range(SHARDS) for port in options.ports_of_shard(index)}
    needed = {f"TCP {port}" for port in {options.ports_of_coordinator()[0], *data}}
    stranger = Peer("stranger", "here", {"app.kubernetes.io/name": "else"}, {})
    names = {f"{protocol} {port}" for protocol in ("TCP", "UDP") for port in (53, 5353)}
    found = {pair: ports - names for pair, ports in reach(manifests, [stranger]).items()}
    assert {pair: ports for pair, ports in found.items() if ports} == {("worker", "train"): needed}


def test_a_pod_comes_again_after_the_one_before_and_only_so_often(manifests):
    train, worker = (job["spec"] for job in sorted(of_kind(manifests, "Job"), key=lambda job: job["metadata"]["name"]))
    assert (train["backoffLimit"], worker["backoffLimitPerIndex"]) == (5, 20)
    for job in (train, worker):
        assert job["podReplacementPolicy"] == "Failed"
        assert job["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert worker["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [2, 4]
