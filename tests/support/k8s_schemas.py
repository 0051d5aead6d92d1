"""Whether a manifest is valid: by Kubernetes' own schemas, and by the fields of custom resources that we use."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterator

import pytest

from support.k8s_manifests import Manifest

MINORS = 3
JOBSET_FIELDS = {
    "network": {"enableDNSHostnames"},
    "successPolicy": {"operator", "targetReplicatedJobs"},
    "failurePolicy": {"maxRestarts"},
}
"""Fields of a JobSet's spec that we use, as its API documents them; the jobs in it are checked as Jobs."""
MONITORS = {"PodMonitor": "podMetricsEndpoints", "ServiceMonitor": "endpoints"}
ENDPOINT_FIELDS = {"port", "path", "interval", "relabelings"}
CERTIFICATE_FIELDS = {
    *("secretName", "commonName", "isCA", "uris", "dnsNames", "usages", "duration", "renewBefore"),
    *("privateKey", "issuerRef"),
}
PRIVATE_KEY_FIELDS = {"algorithm", "size", "encoding", "rotationPolicy"}


def assert_valid(manifest: Manifest) -> None:
    """Raise unless a manifest is valid, strictly, for the last minors of Kubernetes."""
    validation = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")
    major, newest, _ = validation.latest_version().split(".")
    for minor in range(int(newest) - MINORS + 1, int(newest) + 1):
        for builtin in builtins(manifest):
            check(json.dumps(builtin, sort_keys=True), f"{major}.{minor}")


@functools.cache
def check(manifest: str, version: str) -> None:
    """Raise unless a manifest, as JSON, is valid; most are the same in many folders, and a schema is slow to read."""
    importlib.import_module("kubernetes_validate").validate(json.loads(manifest), version, strict=True)


def builtins(manifest: Manifest) -> Iterator[Manifest]:
    """Yield what Kubernetes' own schemas know: a manifest, or the Jobs inside a JobSet."""
    if manifest["kind"] == "JobSet":
        assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert set(manifest["spec"]) == {*JOBSET_FIELDS, "replicatedJobs"}
        for field, allowed in JOBSET_FIELDS.items():
            assert set(manifest["spec"][field]) == allowed
        for job in manifest["spec"]["replicatedJobs"]:
            assert set(job) == {"name", "replicas", "template"}
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
    elif manifest["kind"] in MONITORS:
        assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
        endpoints = MONITORS[manifest["kind"]]
        assert set(manifest["spec"]) == {"selector", endpoints}
        assert all(set(endpoint) == ENDPOINT_FIELDS for endpoint in manifest["spec"][endpoints])
    elif manifest["kind"] == "Issuer":
        assert manifest["apiVersion"] == "cert-manager.io/v1"
        assert manifest["spec"] == {"selfSigned": {}} or set(manifest["spec"]["ca"]) == {"secretName"}
    elif manifest["kind"] == "Certificate":
        assert manifest["apiVersion"] == "cert-manager.io/v1"
        assert set(manifest["spec"]) <= CERTIFICATE_FIELDS
        assert set(manifest["spec"]["privateKey"]) == PRIVATE_KEY_FIELDS
        assert set(manifest["spec"]["issuerRef"]) == {"group", "kind", "name"}
    else:
        yield manifest
