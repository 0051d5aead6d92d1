"""deploy/k8s: it is what render writes, every schema takes it, and it says what the product needs and no more."""

import functools
import importlib
import json
import re
from pathlib import Path

import pytest
import yaml
from k8s_manifests import EXAMPLE, K8S, KUSTOMIZATIONS, kustomized, of_kind, pod_templates, pods
from typer.testing import CliRunner

from parashard.cli import app
from parashard.process import ExitCode

MINORS = 3
JOBSET_FIELDS = {"successPolicy": {"operator", "targetReplicatedJobs"}, "failurePolicy": {"maxRestarts"}}
"""Fields of a JobSet's spec that we use, as its API documents them; the jobs in it are checked as Jobs."""
POD_MONITOR_FIELDS = {"selector", "podMetricsEndpoints"}
ENDPOINT_FIELDS = {"port", "path", "interval", "relabelings"}


@pytest.fixture(scope="module", params=KUSTOMIZATIONS)
def manifests(request):
    return kustomized(K8S / request.param)


def test_the_committed_manifests_are_what_render_writes_for_the_example(tmp_path):
    ran = CliRunner().invoke(app, ["render", "k8s", str(EXAMPLE), "--output", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert texts(tmp_path) == texts(K8S), (
        f"parashard render k8s examples/digits.toml --output {K8S.relative_to(K8S.parent.parent)}"
    )


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


# --- the schemas ---


def test_every_manifest_is_valid_for_the_last_minors_of_kubernetes(manifests):
    validation = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")
    major, newest, _ = validation.latest_version().split(".")
    for manifest in manifests:
        for minor in range(int(newest) - MINORS + 1, int(newest) + 1):
            for builtin in builtins(manifest):
                check(json.dumps(builtin, sort_keys=True), f"{major}.{minor}")


@functools.cache
def check(manifest: str, version: str) -> None:
    """Raise unless a manifest, as JSON, is valid; most are the same in many folders, and a schema is slow to read."""
    importlib.import_module("kubernetes_validate").validate(json.loads(manifest), version, strict=True)


def builtins(manifest):
    """Yield what Kubernetes' own schemas know: a manifest, or the Jobs inside a JobSet."""
    if manifest["kind"] == "JobSet":
        assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert set(manifest["spec"]) == {*JOBSET_FIELDS, "replicatedJobs"}
        for field, allowed in JOBSET_FIELDS.items():
            assert set(manifest["spec"][field]) == allowed
        for job in manifest["spec"]["replicatedJobs"]:
            assert set(job) == {"name", "replicas", "template"}
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
    elif manifest["kind"] == "PodMonitor":
        assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
        assert set(manifest["spec"]) == POD_MONITOR_FIELDS
        assert all(set(endpoint) == ENDPOINT_FIELDS for endpoint in manifest["spec"]["podMetricsEndpoints"])
    else:
        yield manifest


# --- what binds all of them ---


def test_every_pod_is_restricted(manifests):
    # The "restricted" standard, https://kubernetes.io/docs/concepts/security/pod-security-standards/, and more.
    for template in pod_templates(manifests):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        assert all(set(volume) & {"configMap", "emptyDir", "persistentVolumeClaim"} for volume in pod["volumes"])


def test_every_container_has_a_memory_limit_and_no_cpu_limit(manifests):
    for template in pod_templates(manifests):
        for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
            resources = container["resources"]
            assert resources["limits"]["memory"] == resources["requests"]["memory"]
            assert "cpu" in resources["requests"]
            assert "cpu" not in resources["limits"]


def test_every_process_is_probed_on_its_http_port(manifests):
    for pod in pods(manifests).values():
        (container,) = pod["containers"]
        assert {"name": "http", "containerPort": 9100} in container["ports"]
        assert "--http-port=9100" in container["args"]
        paths = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert paths["startupProbe"] == paths["livenessProbe"] == {"path": "/livez", "port": "http"}
        assert paths["readinessProbe"] == {"path": "/readyz", "port": "http"}


def test_that_nothing_is_encrypted_is_said_in_one_place(manifests):
    said = [text for text in map(yaml.safe_dump, manifests) if "--insecure" in text]
    assert len(said) == 1
    assert yaml.safe_load(said[0])["data"] == {"flag": "--insecure"}
    for pod in pods(manifests).values():
        assert "$(SECURITY)" in pod["containers"][0]["args"]


def test_every_variable_in_an_argument_is_given(manifests):
    for pod in pods(manifests).values():
        (container,) = pod["containers"]
        named = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert named == {variable["name"] for variable in container["env"]}


def test_nobody_reaches_a_pod_but_as_a_policy_says(manifests):
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind(manifests, "NetworkPolicy")}
    assert policies["digits-deny"] == {
        "podSelector": {"matchLabels": {"app.kubernetes.io/instance": "digits"}},
        "policyTypes": ["Ingress", "Egress"],
    }
    for spec in policies.values():
        for rule in spec.get("ingress", []):
            assert rule["ports"]
            assert all(rule["from"])
        for rule in spec.get("egress", []):
            # The API server's address is told by no label; its ports are.
            assert all(rule["to"]) if "to" in rule else {port["port"] for port in rule["ports"]} == {443, 6443}


def test_a_worker_is_started_again_unless_its_configuration_is_wrong(manifests):
    specs = [job["spec"] for job in of_kind(manifests, "Job")]
    for jobset in of_kind(manifests, "JobSet"):
        specs += [job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]]
    assert specs
    for spec in specs:
        assert spec["completionMode"] == "Indexed"
        assert spec["podReplacementPolicy"] == "Failed"
        disrupted, stopped, configuration = spec["podFailurePolicy"]["rules"]
        assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert stopped["action"] == "Ignore"
        assert stopped["onExitCodes"]["values"] == [ExitCode.RETRY]
        assert configuration["action"] == "FailJob"
        assert configuration["onExitCodes"]["values"] == [ExitCode.CONFIGURATION]
        # One that is asked to stop must not look as if its index were complete.
        (container,) = spec["template"]["spec"]["containers"]
        assert f"--stopped-exit-code={int(ExitCode.RETRY)}" in container["args"]


# --- what each of them is for ---


def test_a_shards_index_is_its_pods_ordinal():
    (container,) = pods(kustomized(K8S / "base"))["shard"]["containers"]
    assert "--index=$(SHARD_INDEX)" in container["args"]
    assert {
        "name": "SHARD_INDEX",
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}},
    } in container["env"]


def test_the_coordinator_may_watch_pods_and_scale_one_job_and_nobody_else_may_anything():
    rendered = kustomized(K8S / "base")
    (role,) = of_kind(rendered, "Role")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {
            "apiGroups": ["batch"],
            "resources": ["jobs"],
            "resourceNames": ["digits-worker", "digits-worker-0"],
            "verbs": ["get", "patch"],
        },
    ]
    (binding,) = of_kind(rendered, "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "digits-coordinator"}]
    found = pods(rendered)
    assert found["coordinator"]["serviceAccountName"] == "digits-coordinator"
    for role_name in ("shard", "worker"):
        assert found[role_name]["automountServiceAccountToken"] is False


def test_a_drain_takes_one_of_coordinator_and_shards_at_a_time():
    (budget,) = of_kind(kustomized(K8S / "base"), "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchExpressions"][0]["values"] == ["coordinator", "shard"]
    # Jobs have no scale to count down from: of a coordinator and two shards, two stay.
    (budget,) = of_kind(kustomized(K8S / "overlays/jobset"), "PodDisruptionBudget")
    assert "maxUnavailable" not in budget["spec"]
    assert budget["spec"]["minAvailable"] == 2


def test_gpu_workers_have_a_card_and_the_image_for_it():
    found = pods(kustomized(K8S / "overlays/gpu"))
    (container,) = found["worker"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"] == found["worker"]["initContainers"][0]["image"] == "parashard-cuda:latest"
    assert "--device=cuda" in container["args"]
    assert "nvidia.com/gpu" in [toleration["key"] for toleration in found["worker"]["tolerations"]]
    assert found["shard"]["containers"][0]["image"] == "parashard:latest"


def test_cpu_workers_take_no_card():
    (container,) = pods(kustomized(K8S / "overlays/cpu"))["worker"]["containers"]
    assert "--device=cpu" in container["args"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


@pytest.mark.parametrize("overlay", ["spot", "gpu-spot"])
def test_only_workers_go_to_spot_machines_and_they_leave_in_15_s(overlay):
    found = pods(kustomized(K8S / "overlays" / overlay))
    assert found["worker"]["terminationGracePeriodSeconds"] == 15
    wanted = labels_of(found["worker"])
    for state in ("coordinator", "shard"):
        assert labels_of(found[state]) == wanted
        (term,) = terms_of(found[state])
        assert {expression["operator"] for expression in term["matchExpressions"]} <= {"DoesNotExist", "NotIn"}


def test_components_add_up():
    tolerated = {
        toleration["key"] for toleration in pods(kustomized(K8S / "overlays/gpu-spot"))["worker"]["tolerations"]
    }
    assert {"nvidia.com/gpu", "cloud.google.com/gke-spot"} <= tolerated


def terms_of(pod):
    return pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]


def labels_of(pod):
    return {expression["key"] for term in terms_of(pod) for expression in term["matchExpressions"]}


def test_prometheus_is_told_of_every_pod_and_let_through_to_the_port_that_reads():
    rendered = kustomized(K8S / "overlays/monitoring")
    (monitor,) = of_kind(rendered, "PodMonitor")
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    assert all(selected <= template["metadata"]["labels"].items() for template in pod_templates(rendered))
    (policy,) = (p["spec"] for p in of_kind(rendered, "NetworkPolicy") if p["metadata"]["name"] == "digits-metrics")
    assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": "http"}]


def test_a_job_set_replaces_what_it_holds_and_ends_with_the_workers():
    rendered = kustomized(K8S / "overlays/jobset")
    assert not of_kind(rendered, "StatefulSet")
    assert not of_kind(rendered, "Job")
    (jobset,) = of_kind(rendered, "JobSet")
    assert [job["name"] for job in jobset["spec"]["replicatedJobs"]] == ["coordinator", "shard", "worker"]
    assert jobset["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["worker"]}
    assert "kueue.x-k8s.io/queue-name" in jobset["metadata"]["labels"]
    assert all(pod["restartPolicy"] == "Never" for pod in pods(rendered).values())
