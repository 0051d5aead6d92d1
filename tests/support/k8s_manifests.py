"""The manifests as tests see them: rendered by Kustomize, and each pod in them, whatever holds it."""

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
EXAMPLE = ROOT / "examples" / "digits.toml"
KUSTOMIZATIONS = ["base", *sorted(f"overlays/{path.name}" for path in (K8S / "overlays").glob("*"))]

Manifest = dict[str, Any]


@functools.cache
def kustomized(folder: Path) -> list[Manifest]:
    """Return the objects that Kustomize makes of a folder, not to be changed; without a Kustomize, skip the test."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            break
    else:
        pytest.skip("needs kustomize or kubectl to render overlays: install one of them")
    ran = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ran.returncode == 0, ran.stderr
    return list(yaml.load_all(ran.stdout, yaml.CSafeLoader))


def pod_templates(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Yield the pod template of everything that has one."""
    for manifest in manifests:
        if manifest["kind"] == "JobSet":
            yield from (job["template"]["spec"]["template"] for job in manifest["spec"]["replicatedJobs"])
        elif "template" in manifest.get("spec", {}):
            yield manifest["spec"]["template"]


def component(labelled: Manifest) -> str:
    """Return which of our processes something is, or is of: coordinator, shard or worker."""
    return labelled["metadata"]["labels"]["app.kubernetes.io/component"]


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return each process's pod, by component."""
    return {component(template): template["spec"] for template in pod_templates(manifests)}


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Return the manifests of one kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]
