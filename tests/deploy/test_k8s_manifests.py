"""deploy/k8s: it is what render writes, every schema takes it, and it says what the product needs and no more."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from parashard.cli.main import app
from parashard.process.shell import ExitCode
from support.k8s_manifests import EXAMPLE, K8S, kustomized, of_kind, pod_templates, pods
from support.k8s_schemas import MONITORS, assert_valid


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
    for manifest in manifests:
        assert_valid(manifest)


@pytest.mark.parametrize("flags", [["--certificates=secrets"], ["--set=cluster.insecure=true"]])
def test_so_is_every_other_way_to_certificates(flags, tmp_path):
    ran = CliRunner().invoke(app, ["render", "k8s", str(EXAMPLE), "--output", str(tmp_path), *flags])
    assert ran.exit_code == 0, ran.output
    for folder in ("base", "overlays/jobset"):
        for manifest in kustomized(tmp_path / folder):
            assert_valid(manifest)


OBJECT_STORE = ("--set=checkpoint.url=s3://bucket/digits", "--store-secret=digits-s3", "--store-port=9000")


def test_so_is_a_job_with_an_object_store(tmp_path):
    ran = CliRunner().invoke(app, ["render", "k8s", str(EXAMPLE), "--output", str(tmp_path), *OBJECT_STORE])
    assert ran.exit_code == 0, ran.output
    for folder in ("base", "overlays/jobset"):
        for manifest in kustomized(tmp_path / folder):
            assert_valid(manifest)


def test_so_is_the_documents_overlay_for_a_cloud_role_in_place_of_a_secret(tmp_path):
    ran = CliRunner().invoke(app, ["render", "k8s", str(EXAMPLE), "--output", str(tmp_path), OBJECT_STORE[0]])
    assert ran.exit_code == 0, ran.output
    section = (K8S.parent.parent / "docs/kubernetes.md").read_text().partition("\n## An object store\n")[2]
    overlay = section.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "overlays/role").mkdir()
    (tmp_path / "overlays/role/kustomization.yaml").write_text(overlay)
    manifests = kustomized(tmp_path / "overlays/role")
    for manifest in manifests:
        assert_valid(manifest)
    (account,) = of_kind(manifests, "ServiceAccount")
    assert list(account["metadata"]["annotations"]) == ["eks.amazonaws.com/role-arn"]
    shard = pods(manifests)["shard"]
    assert shard["serviceAccountName"] == account["metadata"]["name"]
    assert shard["automountServiceAccountToken"] is False  # no key to the Kubernetes API


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
        assert all(
            set(volume) & {"configMap", "emptyDir", "persistentVolumeClaim", "secret"} for volume in pod["volumes"]
        )


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


def test_every_variable_in_an_argument_is_given(manifests):
    for pod in pods(manifests).values():
        (container,) = pod["containers"]
        named = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert named == {variable["name"] for variable in container["env"] if "valueFrom" in variable}


def test_pods_accept_only_connections_that_a_policy_allows(manifests):
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
            # No label identifies the API server and name servers; their ports do.
            by_port = {port["port"] for port in rule["ports"]} in ({443, 6443}, {53, 5353})
            assert all(rule["to"]) if "to" in rule else by_port


def test_the_job_file_cannot_be_changed_and_what_is_ended_by_its_label_has_it(manifests):
    # docs/kubernetes.md, "Changing a job that runs".
    (job_file,) = of_kind(manifests, "ConfigMap")
    assert (job_file["metadata"]["name"], job_file["immutable"]) == ("digits-job", True)
    ended = [one for one in manifests if one["kind"] in ("StatefulSet", "Job", "JobSet")]
    assert len(ended) in (1, 3)
    assert {one["metadata"]["labels"]["app.kubernetes.io/instance"] for one in ended} == {"digits"}
    assert of_kind(manifests, "PersistentVolumeClaim")  # which `kubectl delete -k` takes as well


def test_a_worker_is_started_again_unless_its_configuration_is_wrong_or_the_job_has_failed(manifests):
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
        assert stopped["onExitCodes"]["values"] == [ExitCode.IO_ERROR, ExitCode.RETRY]
        assert configuration["action"] == "FailJob"
        (container,) = spec["template"]["spec"]["containers"]
        hopeless = [ExitCode.CONFIGURATION, *[ExitCode.JOB_FAILED] * (container["name"] == "worker")]
        assert configuration["onExitCodes"]["values"] == hopeless
        # One that is asked to stop must not look as if its index were complete.
        assert f"--stopped-exit-code={int(ExitCode.RETRY)}" in container["args"]


# --- what each of them is for ---


def test_a_shards_index_is_its_pods_ordinal():
    (container,) = pods(kustomized(K8S / "base"))["shard"]["containers"]
    assert "--index=$(SHARD_INDEX)" in container["args"]
    assert {
        "name": "SHARD_INDEX",
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}},
    } in container["env"]


def test_only_the_coordinator_may_watch_pods_and_scale_one_job():
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


def test_gpu_workers_have_a_gpu_and_the_image_for_it():
    found = pods(kustomized(K8S / "overlays/gpu"))
    (container,) = found["worker"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"] == found["worker"]["initContainers"][0]["image"] == "parashard-cuda:latest"
    assert "--device=cuda" in container["args"]
    assert "nvidia.com/gpu" in [toleration["key"] for toleration in found["worker"]["tolerations"]]
    assert found["shard"]["containers"][0]["image"] == "parashard:latest"


def test_cpu_workers_take_no_gpu():
    (container,) = pods(kustomized(K8S / "overlays/cpu"))["worker"]["containers"]
    assert "--device=cpu" in container["args"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


@pytest.mark.parametrize("overlay", ["spot", "gpu-spot"])
def test_only_workers_go_to_spot_machines_and_they_leave_in_15_s(overlay):
    found = pods(kustomized(K8S / "overlays" / overlay))
    assert found["worker"]["terminationGracePeriodSeconds"] == 15
    assert "--set=cluster.grace_s=10" in found["worker"]["containers"][0]["args"]
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


@pytest.mark.parametrize(("overlay", "kind"), [("monitoring", "PodMonitor"), ("servicemonitor", "ServiceMonitor")])
def test_prometheus_is_told_of_every_pod_and_let_through_to_the_port_that_reads(overlay, kind):
    rendered = kustomized(K8S / "overlays" / overlay)
    (monitor,) = of_kind(rendered, "PodMonitor") + of_kind(rendered, "ServiceMonitor")  # with both, all counts twice
    assert monitor["kind"] == kind
    selected, port = monitor["spec"]["selector"]["matchLabels"], "http"
    if kind == "ServiceMonitor":
        (service,) = (one for one in of_kind(rendered, "Service") if chosen(selected, one["metadata"]["labels"]))
        selected, port = service["spec"]["selector"], service["spec"]["ports"][0]["targetPort"]
        assert service["spec"]["clusterIP"] == "None"
    assert all(chosen(selected, template["metadata"]["labels"]) for template in pod_templates(rendered))
    (endpoint,) = monitor["spec"][MONITORS[kind]]
    assert (endpoint["port"], port) == ("http", "http")
    assert endpoint["relabelings"] == [
        {"targetLabel": "job", "replacement": "parashard"},
        {"targetLabel": "run", "sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"]},
    ]
    (policy,) = (p["spec"] for p in of_kind(rendered, "NetworkPolicy") if p["metadata"]["name"] == "digits-metrics")
    assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": "http"}]


def test_all_ways_to_scrape_give_series_the_same_job():
    folder = K8S.parent / "prometheus"
    by_hand = yaml.safe_load((folder / "podmonitor.yaml").read_text())
    (rendered,) = of_kind(kustomized(K8S / "overlays" / "monitoring"), "PodMonitor")
    (ours,), (theirs,) = (monitor["spec"]["podMetricsEndpoints"] for monitor in (by_hand, rendered))
    assert ours == theirs
    jobs = {
        relabelling.get("replacement") for relabelling in ours["relabelings"] if relabelling["targetLabel"] == "job"
    }
    for name in ("prometheus.yml", "local.yml", "static.yml"):
        jobs |= {scraped["job_name"] for scraped in yaml.safe_load((folder / name).read_text())["scrape_configs"]}
    assert jobs == {"parashard"}


def chosen(selector, labels):
    return selector.items() <= labels.items()


def test_a_job_set_replaces_what_it_holds_and_ends_with_the_workers():
    rendered = kustomized(K8S / "overlays/jobset")
    assert not of_kind(rendered, "StatefulSet")
    assert not of_kind(rendered, "Job")
    (jobset,) = of_kind(rendered, "JobSet")
    assert [job["name"] for job in jobset["spec"]["replicatedJobs"]] == ["coordinator", "shard", "worker"]
    assert jobset["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["worker"]}
    assert "kueue.x-k8s.io/queue-name" in jobset["metadata"]["labels"]
    assert all(pod["restartPolicy"] == "Never" for pod in pods(rendered).values())


@pytest.mark.parametrize("components", [("cpu", "spot"), ("gpu", "spot", "monitoring")])
def test_components_change_a_jobsets_pods_as_they_change_others(components, tmp_path):
    shutil.copytree(K8S, tmp_path, dirs_exist_ok=True)
    changed = {}
    for below in ("base", "overlays/jobset"):
        folder = tmp_path / "overlays" / f"{Path(below).name}-changed"
        folder.mkdir()
        added = {"resources": [f"../../{below}"], "components": [f"../../components/{name}" for name in components]}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(added))
        for manifest in (manifests := kustomized(folder)):
            assert_valid(manifest)
        changed[below] = pods(manifests)
        assert changed[below] != pods(kustomized(K8S / below))
    for role, pod in changed["base"].items():
        other = changed["overlays/jobset"][role]
        for field in ("affinity", "tolerations", "terminationGracePeriodSeconds", "initContainers"):
            assert other.get(field) == pod.get(field), (role, field)
        (container,), (inside,) = pod["containers"], other["containers"]
        assert {**inside, "args": (), "env": ()} == {**container, "args": (), "env": ()}
    worker, in_jobset = (found["worker"]["containers"][0] for found in changed.values())
    assert in_jobset["args"] == worker["args"]
