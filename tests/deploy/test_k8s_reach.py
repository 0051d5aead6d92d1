"""The objects of deploy/k8s fit together: who reaches whom, services and pods, roles, mounts, where pods are put."""

import re
import tomllib
from pathlib import PurePosixPath

import pytest
from typer.testing import CliRunner

from parashard.cli.main import app
from support.k8s_manifests import EXAMPLE, ROOT, component, kustomized, of_kind, pod_templates, pods
from support.k8s_reach import HERE, Peer, named_ports, reach, selects

ROLES = ("coordinator", "shard", "worker")
PORTS = {"grpc": 7000, "data": 7001, "http": 9100}
OURS = {"app.kubernetes.io/name": "parashard", "app.kubernetes.io/instance": "digits"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}


# --- who reaches which port of whom ---


def labels_of(role, **others):
    return OURS | {"app.kubernetes.io/component": role} | {f"app.kubernetes.io/{key}": to for key, to in others.items()}


OUTSIDERS = [
    Peer("names", "kube-system", {"k8s-app": "kube-dns"}, PORTS),
    Peer("the API server", None, {}, PORTS),
    Peer("prometheus", "monitoring", PROMETHEUS, PORTS),
    Peer("prometheus elsewhere", "elsewhere", PROMETHEUS, PORTS),
    Peer("a prometheus beside", HERE, PROMETHEUS, PORTS),
    Peer("prometheus's neighbour", "monitoring", {}, PORTS),
    Peer("a pod beside", HERE, {}, PORTS),
    *(Peer(f"another job's {role}", HERE, labels_of(role, instance="another"), PORTS) for role in ROLES),
    *(Peer(f"a {role} elsewhere", "elsewhere", labels_of(role), PORTS) for role in ROLES),
]

TABLE = {
    ("coordinator", "shard"): {"TCP 7000"},
    ("shard", "coordinator"): {"TCP 7000"},
    ("worker", "coordinator"): {"TCP 7000"},
    ("worker", "shard"): {"TCP 7000", "TCP 7001"},
}
NAMES = {f"{protocol} {port}" for protocol in ("UDP", "TCP") for port in (53, 5353)}
ANYWHERE = {"coordinator": {"TCP 443", "TCP 6443"}}
"""The API server, like name servers, is known by its ports only."""
SCRAPES = {("prometheus", role): {"TCP 9100"} for role in ROLES}
SCRAPED = {"overlays/monitoring", "overlays/servicemonitor"}


def table(anywhere, more=()):
    """Return the table with ports that roles may reach wherever they are."""
    expected = TABLE | dict(more)
    for role in ROLES:
        expected |= {(role, peer.name): NAMES | anywhere.get(role, set()) for peer in OUTSIDERS}
    return expected


def test_which_pod_reaches_which_port_and_no_other(kustomization, manifests):
    assert reach(manifests, OUTSIDERS) == table(ANYWHERE, SCRAPES if kustomization in SCRAPED else {})


def test_coordinator_and_shards_reach_an_object_store_too(tmp_path):
    flags = ("--set=checkpoint.url=s3://bucket/digits", "--store-secret=digits-s3", "--store-port=9000")
    ran = CliRunner().invoke(app, ["render", "k8s", str(EXAMPLE), "--output", str(tmp_path), *flags])
    assert ran.exit_code == 0, ran.output
    anywhere = {"coordinator": {"TCP 443", "TCP 6443", "TCP 9000"}, "shard": {"TCP 9000"}}
    assert reach(kustomized(tmp_path / "base"), OUTSIDERS) == table(anywhere)


# --- services and pods ---

PORT_FLAGS = {"--port": "grpc", "--data-port": "data", "--http-port": "http"}
SERVED = {"digits-coordinator": {"coordinator"}, "digits-shard": {"shard"}, "digits-metrics": set(ROLES)}


def flags_of(pod):
    (container,) = pod["containers"]
    return dict(argument.split("=", 1) for argument in container["args"] if "=" in argument)


def test_a_process_listens_on_the_ports_that_its_pod_names(manifests):
    for role, pod in pods(manifests).items():
        flags = flags_of(pod)
        listens = {name: int(flags[flag]) for flag, name in PORT_FLAGS.items() if flag in flags}
        assert named_ports(pod) == listens, role
        advertised = {"grpc": "--advertise", "data": "--advertise-data"}
        for name, flag in advertised.items():
            assert (flag in flags) == (name in listens), role
            assert flag not in flags or flags[flag].endswith(f":{listens[name]}"), role


def test_a_service_leads_to_its_pods_at_the_ports_that_they_have(kustomization, manifests):
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(manifests, "Service")}
    assert set(services) == set(SERVED) - ({"digits-metrics"} if kustomization != "overlays/servicemonitor" else set())
    for name, spec in services.items():
        chosen = [one for one in pod_templates(manifests) if selects({"matchLabels": spec["selector"]}, labels(one))]
        assert {component(template) for template in chosen} == SERVED[name]
        # Peers register before they are ready, and are scraped then.
        assert spec["publishNotReadyAddresses"] is True
        for port in spec["ports"]:
            assert {named_ports(template["spec"])[port["targetPort"]] for template in chosen} == {port["port"]}, name


def labels(template):
    return template["metadata"]["labels"]


def test_what_a_process_connects_to_is_a_service_at_its_port(manifests):
    services = {
        f"{service['metadata']['name']}:{port['port']}": port["targetPort"]
        for service in of_kind(manifests, "Service")
        for port in service["spec"]["ports"]
    }
    for role in ("shard", "worker"):
        assert flags_of(pods(manifests)[role])["--connect"] == "digits-coordinator:7000"
    assert services["digits-coordinator:7000"] == "grpc"


# --- roles ---


def test_the_role_that_is_bound_is_there_and_is_the_coordinators(manifests):
    accounts = {account["metadata"]["name"] for account in of_kind(manifests, "ServiceAccount")}
    roles = {role["metadata"]["name"] for role in of_kind(manifests, "Role")}
    (binding,) = of_kind(manifests, "RoleBinding")
    assert binding["roleRef"]["apiGroup"] == "rbac.authorization.k8s.io"
    assert binding["roleRef"]["kind"] == "Role"
    assert binding["roleRef"]["name"] in roles
    found = pods(manifests)
    bound = {(subject["kind"], subject["name"]) for subject in binding["subjects"]}
    assert bound == {("ServiceAccount", found["coordinator"]["serviceAccountName"])}
    assert {pod["serviceAccountName"] for pod in found.values() if "serviceAccountName" in pod} <= accounts


def test_the_job_that_the_coordinator_scales_is_the_workers_and_its_role_names_it(manifests):
    jobs = {job["metadata"]["name"]: job["spec"]["template"] for job in of_kind(manifests, "Job")}
    for jobset in of_kind(manifests, "JobSet"):
        name = jobset["metadata"]["name"]
        for job in jobset["spec"]["replicatedJobs"]:
            jobs[f"{name}-{job['name']}-0"] = job["template"]["spec"]["template"]
    scaled = flags_of(pods(manifests)["coordinator"])["--kubernetes-job"]
    assert component(jobs[scaled]) == "worker"
    (role,) = of_kind(manifests, "Role")
    assert scaled in [name for rule in role["rules"] for name in rule.get("resourceNames", ())]


# --- files ---

PATH = re.compile(r"(?:--[a-z-]+=)?(/\S*)")
IMAGE_ENV = dict(re.findall(r"\b((?:NUMBA|CUPY)_CACHE_DIR)=(\S+)", (ROOT / "deploy/docker/Dockerfile").read_text()))


def mount_of(path, container):
    """Return the mount that a path is in, of those that are given the closest."""
    places = [place for place in container["volumeMounts"] if PurePosixPath(path).is_relative_to(place["mountPath"])]
    assert places, f"{path} is in no mount of {container['name']}"
    return max(places, key=lambda place: len(place["mountPath"]))


def source_of(path, pod):
    """Return the volume that a path is in."""
    (container,) = pod["containers"]
    (volume,) = (one for one in pod["volumes"] if one["name"] == mount_of(path, container)["name"])
    return volume


def test_every_path_that_a_process_is_told_of_is_in_a_mount(manifests):
    for pod in pods(manifests).values():
        (container,) = pod["containers"]
        told = [found[1] for argument in container["args"] if (found := PATH.fullmatch(argument))]
        told += [one["value"] for one in container["env"] if one.get("value", "").startswith("/")]
        assert "/tls" in told
        for path in [*told, "/tmp"]:
            mount_of(path, container)


def test_what_is_mounted_is_a_volume_and_every_volume_is_mounted(manifests):
    claims = {claim["metadata"]["name"] for claim in of_kind(manifests, "PersistentVolumeClaim")}
    for pod in pods(manifests).values():
        containers = [*pod.get("initContainers", ()), *pod["containers"]]
        mounted = {place["name"] for container in containers for place in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        claimed = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        assert {claim["claimName"] for claim in claimed} <= claims


def test_the_job_file_is_the_config_maps(manifests):
    coordinator = pods(manifests)["coordinator"]
    path = PurePosixPath(flags_of(coordinator)["--job"])
    volume = source_of(path, coordinator)
    (config,) = of_kind(manifests, "ConfigMap")
    assert volume["configMap"] == {"name": config["metadata"]["name"]}
    assert mount_of(path, coordinator["containers"][0])["mountPath"] == str(path.parent)
    assert path.name in config["data"]


def test_coordinator_and_shards_keep_checkpoints_at_one_place_of_one_store_and_may_write(manifests):
    (config,) = of_kind(manifests, "ConfigMap")
    checkpoints = tomllib.loads(config["data"]["job.toml"])["checkpoint"]["url"]
    found = pods(manifests)
    places = []
    for role, path in (
        ("coordinator", flags_of(found["coordinator"])["--run-dir"]),
        ("coordinator", checkpoints),
        ("shard", checkpoints),
    ):
        place = mount_of(path, found[role]["containers"][0])
        assert not place.get("readOnly"), role
        assert "subPath" not in place, role
        places.append((place["mountPath"], source_of(path, found[role])["persistentVolumeClaim"]))
    assert places == [places[0]] * 3


def test_kernels_are_compiled_where_the_image_says_and_what_it_has_is_copied_there(manifests):
    found = pods(manifests)
    for role in ("shard", "worker"):
        (container,) = found[role]["containers"]
        assert set(IMAGE_ENV) == {"NUMBA_CACHE_DIR", "CUPY_CACHE_DIR"}
        assert not {variable["name"] for variable in container["env"]} & set(IMAGE_ENV)
        for path in IMAGE_ENV.values():
            assert "emptyDir" in source_of(path, found[role])
            assert not mount_of(path, container).get("readOnly")
        (warm,) = found[role]["initContainers"]
        *_, image_folder, copied_to = warm["args"]
        assert image_folder == f"{IMAGE_ENV['NUMBA_CACHE_DIR']}/."
        cache = mount_of(IMAGE_ENV["NUMBA_CACHE_DIR"], container)
        assert cache["mountPath"] == IMAGE_ENV["NUMBA_CACHE_DIR"]
        # Mounted at the same place, it would hide what is to be copied.
        assert warm["volumeMounts"] == [{"name": cache["name"], "mountPath": copied_to}]


# --- where pods are put, and when ---


def test_all_shards_start_at_once(manifests):
    for one in of_kind(manifests, "StatefulSet"):
        if component(one) == "shard":
            assert one["spec"]["podManagementPolicy"] == "Parallel"


@pytest.mark.parametrize("role", ["shard", "worker"])
def test_pods_of_one_role_spread_over_nodes_where_there_are_some(manifests, role):
    (constraint,) = pods(manifests)[role]["topologySpreadConstraints"]
    chosen = [one for one in pod_templates(manifests) if selects(constraint["labelSelector"], labels(one))]
    assert [component(template) for template in chosen] == [role]
    assert constraint["topologyKey"] == "kubernetes.io/hostname"
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    assert constraint["maxSkew"] == 1


def test_a_set_or_job_is_of_the_pods_that_it_makes(manifests):
    for one in of_kind(manifests, "StatefulSet"):
        selector = one["spec"]["selector"]
        chosen = {component(other) for other in pod_templates(manifests) if selects(selector, labels(other))}
        assert chosen == {component(one["spec"]["template"])} == {component(one)}


def test_a_drain_waits_for_coordinator_and_shards_but_not_for_one_that_is_not_ready(manifests):
    (budget,) = of_kind(manifests, "PodDisruptionBudget")
    selector = budget["spec"]["selector"]
    chosen = {component(one) for one in pod_templates(manifests) if selects(selector, labels(one))}
    assert chosen == {"coordinator", "shard"}
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
