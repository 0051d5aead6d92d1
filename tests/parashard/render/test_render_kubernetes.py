"""render k8s: which of a job's values end in which manifest, and which jobs cannot run there."""

import tomllib
from typing import Any

import pytest
import yaml

from parashard.errors import ConfigurationError
from parashard.job.layers import parse_set
from parashard.job.load import LoadedJob, load_job
from parashard.render.kubernetes import KubernetesOptions, cluster_overrides, render_kubernetes
from support.small_job import SMALL_JOB

JOB = SMALL_JOB.replace('"small"', '"Digits_of.2026"').replace('"synthetic"', '"digits"')


@pytest.fixture
def loaded(tmp_path):
    """Return a function that loads the job with some keys set, for a cluster."""
    path = tmp_path / "job.toml"
    path.write_text(JOB)

    def load(*sets: str) -> LoadedJob:
        flags = [parse_set(text) for text in sets]
        return load_job(path, [*flags, *cluster_overrides(load_job(path, flags, {}))], {})

    return load


def rendered(job: LoadedJob, **options: Any) -> dict[str, str]:
    return render_kubernetes(job, KubernetesOptions(**options))


def cluster_of(files: dict[str, str]) -> dict[str, object]:
    return tomllib.loads(files["base/job.toml"])["cluster"]


def test_every_object_is_named_after_the_job(loaded):
    files = rendered(loaded())
    assert "name: digits-of-2026-shard\n" in files["base/shards.yaml"]
    assert "--connect=digits-of-2026-coordinator:7000" in files["base/workers.yaml"]


def test_a_name_begins_with_a_letter(loaded):
    assert "name: job-2026-11-worker\n" in rendered(loaded("job.name=2026-11"))["base/workers.yaml"]


def test_a_name_that_leaves_no_room_for_pods_labels_is_refused(loaded):
    with pytest.raises(ConfigurationError, match=r"job.name: found 'x{41}', .* 41 characters; allowed .*: 40"):
        rendered(loaded(f"job.name={'x' * 41}"))


def test_numbers_of_shards_and_workers_are_the_jobs(loaded):
    files = rendered(loaded("cluster.shards=3", "cluster.workers=5", "cluster.max_restarts=7", "cluster.grace_s=11.5"))
    assert "replicas: 3\n" in files["base/shards.yaml"]
    assert "parallelism: 5\n  completions: 5\n" in files["base/workers.yaml"]
    assert "backoffLimitPerIndex: 7\n" in files["base/workers.yaml"]
    assert "terminationGracePeriodSeconds: 17\n" in files["base/workers.yaml"]
    assert "value: 3}" in files["overlays/jobset/kustomization.yaml"]


@pytest.mark.parametrize(("grace_s", "told"), [("40", "10"), ("10", "10"), ("2.5", "2.5")])
def test_a_worker_on_a_spot_machine_is_told_how_long_it_has(loaded, grace_s, told):
    files = rendered(loaded(f"cluster.grace_s={grace_s}"))
    for path in ("components/spot/worker.yaml", "components/spot/jobset.yaml"):
        assert "/terminationGracePeriodSeconds\n  value: 15\n" in files[path]
        assert f"value: --set=cluster.grace_s={told}\n" in files[path]


def test_a_job_without_workers_is_refused(loaded):
    with pytest.raises(ConfigurationError, match=r"flag --set: cluster.workers: found 0; allowed on Kubernetes: 1 to"):
        rendered(loaded("cluster.workers=0"))


def test_kubernetes_starts_processes_and_the_coordinator_watches_it(loaded):
    files = rendered(loaded())
    assert cluster_of(files)["launcher"] == "kubernetes"
    assert "--kubernetes-job=digits-of-2026-worker\n" in files["base/coordinator.yaml"]
    assert "--kubernetes-job=digits-of-2026-worker-0\n" in files["overlays/jobset/jobset.yaml"]


def test_a_process_has_as_many_cpus_as_threads(loaded):
    files = rendered(loaded("cluster.worker_threads=4"))
    assert (cluster_of(files)["worker_threads"], cluster_of(files)["shard_threads"]) == (4, 1)
    assert "requests: {cpu: 4, memory: 2Gi}" in files["base/workers.yaml"]
    assert "requests: {cpu: 1, memory: 2Gi}" in files["base/shards.yaml"]


def test_memory_and_images_come_from_flags(loaded):
    digest = "sha256:" + "0" * 64
    options = {"image": "registry.example.org:5000/ml/parashard:0.1.0", "cuda_image": f"parashard-cuda@{digest}"}
    files = rendered(loaded(), coordinator_memory="4Gi", shard_memory="512Mi", worker_memory="1.5G", **options)
    assert containers_of(files, "base/coordinator.yaml")[0]["resources"]["limits"] == {"memory": "4Gi"}
    assert files["overlays/jobset/jobset.yaml"].count("limits: {memory: 4Gi}") == 1
    assert "limits: {memory: 512Mi}" in files["base/shards.yaml"]
    assert "limits: {memory: 1.5G}" in files["base/workers.yaml"]
    said = 'newName: registry.example.org:5000/ml/parashard\n    newTag: "0.1.0"\n'
    assert said in files["base/kustomization.yaml"]
    assert said in files["overlays/jobset/kustomization.yaml"]
    assert f"newName: parashard-cuda\n    digest: {digest}\n" in files["components/gpu/kustomization.yaml"]


@pytest.mark.parametrize(
    ("option", "value", "flag"),
    [
        ("image", "a b", "--image"),
        ("image", "x: y", "--image"),
        ("cuda_image", "", "--cuda-image"),
        ("coordinator_memory", "1 GiB", "--coordinator-memory"),
        ("shard_memory", "2 Gi", "--shard-memory"),
        ("worker_memory", "0", "--worker-memory"),
        ("storage", "much", "--storage"),
        ("storage_class", "a\nb: c", "--storage-class"),
        ("data_claim", "Mine", "--data-claim"),
    ],
)
def test_a_flag_that_would_not_stay_in_its_place_is_refused(loaded, option, value, flag):
    with pytest.raises(ConfigurationError, match=f"flag {flag}: found .*; allowed: "):
        rendered(loaded(), **{option: value})


def test_checkpoints_go_to_a_claim_that_all_share(loaded):
    files = rendered(loaded(), storage="50Gi", storage_class="nfs", access_mode="ReadWriteOnce")
    assert tomllib.loads(files["base/job.toml"])["checkpoint"]["url"] == "/var/lib/parashard/checkpoints"
    claim = files["base/store.yaml"]
    assert "storage: 50Gi" in claim
    assert "storageClassName: nfs" in claim
    assert "accessModes: [ReadWriteOnce]" in claim
    for path in ("base/coordinator.yaml", "base/shards.yaml"):
        assert "persistentVolumeClaim: {claimName: digits-of-2026-store}" in files[path]


def test_checkpoints_in_an_object_store_need_no_claim_and_a_way_out(loaded):
    files = rendered(loaded('checkpoint.url="s3://bucket/digits"'))
    assert "base/store.yaml" not in files
    assert "store.yaml" not in files["base/kustomization.yaml"]
    assert "persistentVolumeClaim" not in "".join(files.values())
    with_claim = rendered(loaded())["base/network.yaml"]
    assert "# The object store." not in with_claim
    assert (
        files["base/network.yaml"].count("# The object store.\n    - ports:\n        - {protocol: TCP, port: 443}") == 2
    )


def containers_of(files: dict[str, str], path: str) -> list[dict[str, Any]]:
    manifests = [one for one in yaml.safe_load_all(files[path]) if "template" in one.get("spec", {})]
    return [one for manifest in manifests for one in manifest["spec"]["template"]["spec"]["containers"]]


def test_an_object_stores_credentials_are_a_secret_of_those_that_use_it(loaded):
    files = rendered(loaded("checkpoint.url=s3://bucket/digits"), store_secret="123", store_port=9000)
    for path in ("base/coordinator.yaml", "base/shards.yaml"):
        (container,) = containers_of(files, path)
        assert container["envFrom"] == [{"secretRef": {"name": "123"}}]
    assert files["overlays/jobset/jobset.yaml"].count('secretRef: {name: "123"}') == 2
    (worker,) = containers_of(files, "base/workers.yaml")
    assert "envFrom" not in worker
    policies = policies_of(files)
    for role, expected in (("coordinator", 1), ("shard", 1), ("worker", 0)):
        egress = policies[role]["egress"]
        assert egress.count({"ports": [{"protocol": "TCP", "port": 9000}]}) == expected


def policies_of(files: dict[str, str]) -> dict[str, Any]:
    found = yaml.safe_load_all(files["base/network.yaml"])
    return {one["metadata"]["name"].removeprefix("digits-of-2026-"): one["spec"] for one in found}


@pytest.mark.parametrize(("ports", "expected"), [((), [443, 6443]), ((16443, 6443, 8443), [443, 6443, 8443, 16443])])
def test_the_coordinator_alone_reaches_the_api_server_at_the_usual_ports_and_those_of_flags(loaded, ports, expected):
    policies = policies_of(rendered(loaded(), api_ports=ports))
    rule = {"ports": [{"protocol": "TCP", "port": port} for port in expected]}
    assert [name for name, spec in policies.items() if rule in spec.get("egress", [])] == ["coordinator"]


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_an_api_servers_port_that_is_none_is_refused(loaded, port):
    with pytest.raises(ConfigurationError, match=f"flag --api-port: found {port}; allowed: 1 to 65535"):
        rendered(loaded(), api_ports=(8443, port))


def test_names_are_asked_for_by_port_wherever_the_cluster_answers(loaded):
    (rule,) = policies_of(rendered(loaded()))["names"]["egress"]
    assert rule == {
        "ports": [{"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")]
    }


def test_without_a_secret_nothing_is_put_into_the_environment(loaded):
    for sets in ((), ("checkpoint.url=s3://bucket/digits",)):
        assert "envFrom" not in "".join(rendered(loaded(*sets)).values())


@pytest.mark.parametrize(("options", "flag"), [({"store_secret": "x"}, "secret"), ({"store_port": 443}, "port")])
def test_what_an_object_store_needs_is_refused_where_there_is_a_claim(loaded, options, flag):
    with pytest.raises(ConfigurationError, match=f"flag --store-{flag}: found .*; allowed: only with an object store"):
        rendered(loaded(), **options)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"store_secret": "a\nb: c"}, "secret"),
        ({"store_secret": "Mine"}, "secret"),
        ({"store_port": 0}, "port"),
        ({"store_port": -1}, "port"),
        ({"store_port": 65536}, "port"),
    ],
)
def test_a_secret_or_a_port_that_is_none_is_refused(loaded, options, flag):
    with pytest.raises(ConfigurationError, match=f"flag --store-{flag}: found .*; allowed: "):
        rendered(loaded("checkpoint.url=s3://bucket/digits"), **options)


def test_data_come_from_a_claim(loaded):
    npz = ("data.source=npz", "data.path=/data/examples.npz")
    files = rendered(loaded(*npz), data_claim="examples")
    for path in ("base/coordinator.yaml", "base/workers.yaml"):
        assert "{name: data, mountPath: /data, readOnly: true}" in files[path]
        assert "persistentVolumeClaim: {claimName: examples, readOnly: true}" in files[path]
    assert "mountPath: /data" not in files["base/shards.yaml"]  # which never looks at an example


@pytest.mark.parametrize(("path", "claim"), [("/data/x.npz", ""), ("/mnt/x.npz", "examples"), ("/data2/x", "examples")])
def test_data_that_the_pods_do_not_have_are_refused(loaded, path, claim):
    job = loaded("data.source=npz", f"data.path={path}")
    with pytest.raises(ConfigurationError, match=f"flag --set: data.path: found {path}, .*--data-claim CLAIM mounts"):
        rendered(job, data_claim=claim)


def test_vocabularies_are_data(loaded):
    table = ('data={source="csv", path="/data/a.csv", label="y"}', "data.vocabularies.a=/data/a.txt")
    assert rendered(loaded(*table), data_claim="examples")
    with pytest.raises(ConfigurationError, match=r"data\.vocabularies\.a: found /a\.txt, .*--data-claim CLAIM mounts"):
        rendered(loaded(*table, "data.vocabularies.a=/a.txt"), data_claim="examples")
