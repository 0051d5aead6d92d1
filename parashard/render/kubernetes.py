"""A job as manifests for Kubernetes: Kustomize's base and overlays, as texts by path, and its pods' certificates."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from parashard.errors import ConfigurationError
from parashard.job.layers import Override
from parashard.job.load import LoadedJob, as_toml
from parashard.render.common import (
    FAREWELL_S,
    check_runnable,
    data_paths,
    filled,
    leave_s,
    parsed_image,
    template,
    templates,
)

NAMES_BYTES_MAX = 6 << 10
"""Limit for one certificate: gRPC's servers drop clients whose certificate exceeds about 8 KiB (decision 0018)."""
NAME_OVERHEAD_BYTES = 2  # before each name: its type and its length

_WITH_TLS = (
    "coordinator_advertise",
    "shard_advertise",
    "operator_env",
    "operator_mount",
    "operator_volume",
    "tls_items",
    "tls_mount",
    "tls_volume",
)
"""Parts of pods with TLS only."""


class Certificates(enum.StrEnum):
    """The issuer of the Secrets with the pods' certificates."""

    CERT_MANAGER = "cert-manager"
    SECRETS = "secrets"  # the user, who runs secrets.sh with their own authority


def certificates_of(loaded: LoadedJob, wanted: Certificates | None) -> Certificates | None:
    """Return the issuer of a job's certificates; None: there are none, because of `cluster.insecure`."""
    if not loaded.job.cluster.insecure:
        return wanted or Certificates.CERT_MANAGER
    if wanted is not None:
        raise ConfigurationError(
            f"{loaded.origins['cluster.insecure']}: cluster.insecure: found true, with --certificates {wanted}; "
            "allowed: one of the two"
        )
    return None


def coordinator_hosts(name: str) -> list[str]:
    """Return the host names of a job's coordinator: its service's, and its pod's own in that service."""
    return [f"{name}-coordinator", f"{name}-coordinator-0", f"{name}-coordinator-0-0"]


def shard_hosts(pod: str, name: str, shards: int) -> list[str]:
    """Return the host names of the shards' pods, `pod` and a number, in their headless service."""
    return [f"{pod}-{index}.{name}-shard" for index in range(shards)]


def security_values(name: str, shards: int, certificates: Certificates | None) -> dict[str, str]:
    """Return the template values for certificates, by name; empty without TLS."""
    in_set, in_jobset = shard_hosts(f"{name}-shard", name, shards), shard_hosts(f"{name}-shard-0", name, shards)
    by_manager, by_script = (certificates is kind for kind in (Certificates.CERT_MANAGER, Certificates.SECRETS))
    if by_manager:
        _check_names(in_jobset, shards)  # the longer ones
    if by_script:
        _check_names([*in_set, *in_jobset], shards)
    values = {part: template(f"pods/{part}.yaml") if certificates else "" for part in _WITH_TLS}
    return values | {
        "security": template(f"pods/{'tls' if certificates else 'insecure'}.yaml"),
        "certificates_resource": "- certificates.yaml" if by_manager else "",
        "jobset_certificate": template("pods/jobset_certificate.yaml") if by_manager else "",
        "coordinator_dns_names": _items(coordinator_hosts(name)),
        "shard_dns_names": _items(in_set),
        "jobset_shard_dns_names": _items(in_jobset),
        "coordinator_host_flags": _flags(coordinator_hosts(name)),
        "shard_host_flags": _flags([*in_set, *in_jobset]),
    }


def _check_names(hosts: list[str], shards: int) -> None:
    used_bytes = sum(len(host) + NAME_OVERHEAD_BYTES for host in hosts)
    if used_bytes > NAMES_BYTES_MAX:
        raise ConfigurationError(
            f"cluster.shards: found {shards}, whose names take {used_bytes} bytes in the shards' certificate; allowed "
            f"on Kubernetes: {NAMES_BYTES_MAX}, so about {shards * NAMES_BYTES_MAX // used_bytes} shards with this "
            "job.name, or more with a shorter one"
        )


def _items(hosts: list[str]) -> str:
    return "\n".join(f"- {host}" for host in hosts)


def _flags(hosts: list[str]) -> str:
    return "\n".join(f"--host {host} \\" for host in hosts)


STORE_FOLDER = "/var/lib/parashard"
DATA_FOLDER = "/data"
JOB_PATH = "base/job.toml"
SECRETS_PATH = "secrets.sh"
STORE_PORT = 443
API_PORTS = (443, 6443)
"""Ports of the API server: its service's, and the usual one behind it."""
PORT_MAX = 65535
SPOT_LEAVE_S = 15
"""Grace period of a pod on Google's spot machines; other clouds have a longer one."""
NAME_LENGTH_MAX = 40
"""A pod's label has 63 characters: the name, the longest role and the digest of a pod's template."""

_QUANTITY = re.compile(r"[1-9]\d*(\.\d+)?([KMGTPE]i|[kMGTPE])?")
_OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
FOLDERS = ("base", "components", "overlays")
_PODS = ("coordinator", "shard", "worker")
"""In the order of the JobSet's parts."""
_PARTS = (
    "container_security",
    "pod_security",
    "tolerations",
    "probes",
    "common_env",
    "common_ports",
    "warm_cache",
    "worker_job",
    "state_job",
    "certificate_life",
)

_WITH_JOB = {
    "restart_policy": template("pods/restart_policy.yaml"),
    "stopped_exit_code": template("pods/stopped_exit_code.yaml"),
}
"""Pod fields for a Job."""
_WITH_SET = {"restart_policy": "", "stopped_exit_code": ""}
"""Pod fields for a StatefulSet, which always restarts its pods."""


@dataclass(frozen=True)
class KubernetesOptions:
    """Settings of manifests that are not in a job file; the flags of `parashard render k8s` say more."""

    image: str = "parashard:latest"  # a reference, such as registry.example.org/team/parashard:0.1.0
    cuda_image: str = "parashard-cuda:latest"
    coordinator_memory: str = "1Gi"  # of one pod, as Kubernetes writes it
    shard_memory: str = "2Gi"
    worker_memory: str = "2Gi"
    storage: str = "10Gi"  # of the checkpoints' volume claim; unused with an object store
    storage_class: str = ""  # empty: the cluster's default
    access_mode: str = "ReadWriteMany"
    data_claim: str = ""  # volume claim that is mounted, read-only, at /data; empty: none
    store_secret: str = ""  # its keys are variables of coordinator and shards, for an object store; empty: none
    store_port: int | None = None  # of an object store; None: 443
    api_ports: Sequence[int] = ()  # of the API server, besides 443 and 6443
    certificates: Certificates | None = None  # None: cert-manager, or none for a job with `cluster.insecure`


def cluster_overrides(loaded: LoadedJob) -> list[Override]:
    """Return the overrides of a job on Kubernetes."""
    # The launcher is Kubernetes. A folder for checkpoints is one inside the pods. Since pods do not share a machine, a
    # pod uses as many threads as it has CPUs, not a share of the machine's cores.
    check_runnable(loaded, "on Kubernetes", "a volume claim")
    job, flag = loaded.job, "of render k8s"
    return [
        ("cluster.launcher", "kubernetes", flag),
        ("checkpoint.url", job.checkpoint.url or f"{STORE_FOLDER}/checkpoints", flag),
        ("cluster.worker_threads", job.cluster.worker_threads or 1, flag),
        ("cluster.shard_threads", job.cluster.shard_threads or 1, flag),
    ]


def render_kubernetes(loaded: LoadedJob, options: KubernetesOptions) -> dict[str, str]:
    """Return the manifests of a job, as text by path below the folder to write them into."""
    job = loaded.job
    if not job.cluster.workers:
        raise ConfigurationError(
            f"{loaded.origins['cluster.workers']}: cluster.workers: found 0; allowed on Kubernetes: 1 to 4096, since a "
            "Job without pods is complete at once"
        )
    _check_data(loaded, options)
    certificates = certificates_of(loaded, options.certificates)
    values = _values(loaded, options)
    values |= security_values(values["name"], job.cluster.shards, certificates)
    with_set, with_job = values | _WITH_SET, values | _WITH_JOB
    for pod in _PODS:
        values[f"{pod}_pod"] = _pod(pod, with_job if pod == "worker" else with_set)
    in_set = with_job | _in_jobset(values["name"])
    for pod in ("coordinator", "shard"):
        values[f"{pod}_jobset_pod"] = _pod(pod, in_set)
    values |= _patches(values)
    skipped = set() if _has_claim(loaded) else {"base/store.yaml"}
    if certificates is not Certificates.CERT_MANAGER:
        skipped.add("base/certificates.yaml")
    paths = [path for folder in FOLDERS for path in templates(folder) if path not in skipped]
    if certificates is Certificates.SECRETS:
        paths.append(SECRETS_PATH)
    return {path: filled(template(path), values) for path in paths} | {JOB_PATH: as_toml(job)}


def _pod(role: str, values: dict[str, str]) -> str:
    return filled(template(f"pods/{role}.yaml"), values | {"role": role})


def _patches(values: dict[str, str]) -> dict[str, str]:
    """Return the components' patches of pods, for a StatefulSet or Job and for a JobSet."""
    pod = "/spec/template/spec"
    parts = {role: f"/spec/replicatedJobs/{index}" for index, role in enumerate(_PODS)}
    patches = {f"{role}_part": part for role, part in parts.items()}
    for component, patch, roles in (
        ("cpu", "worker", ("worker",)),
        ("gpu", "worker", ("worker",)),
        ("spot", "worker", ("worker",)),
        ("spot", "state", ("coordinator", "shard")),
    ):
        text = template(f"patches/{component}_{patch}.yaml")
        patches[f"{component}_{patch}"] = filled(text, values | {"pod": pod})
        for role in roles:
            inside = filled(text, values | {"pod": f"{parts[role]}/template{pod}"})
            patches[f"{component}_{role}_in_jobset"] = inside
    return patches | {"worker_patches": template("patches/worker_patches.yaml")}


def _in_jobset(name: str) -> dict[str, str]:
    """Return the values that differ in a JobSet: its Jobs are named JOBSET-PART-NUMBER, their pods after them."""
    return {
        "shard_index": "annotations['batch.kubernetes.io/job-completion-index']",
        "kubernetes_job": f"{name}-worker-0",
        "coordinator_host": f"{name}-coordinator-0-0",
        "shard_host": f"{name}-shard-0",
        "shard_subdomain": f"# With it, the pods of an Indexed Job have names.\nsubdomain: {name}-shard",
    }


def _values(loaded: LoadedJob, options: KubernetesOptions) -> dict[str, str]:
    """Return the values of all templates except the pods'."""
    job, cluster = loaded.job, loaded.job.cluster
    claim = _has_claim(loaded)
    name = _object_name(job.job.name)
    values = {part: template(f"pods/{part}.yaml") for part in _PARTS} | {
        "name": name,
        "shards": str(cluster.shards),
        "workers": str(cluster.workers),
        "max_restarts": str(cluster.max_restarts),
        "grace_s": str(leave_s(loaded.job)),
        "spot_leave_s": str(SPOT_LEAVE_S),
        "spot_grace_s": f"{min(cluster.grace_s, SPOT_LEAVE_S - FAREWELL_S):g}",
        "worker_cpus": str(cluster.worker_threads),
        "shard_cpus": str(cluster.shard_threads),
        "coordinator_memory": _quantity("--coordinator-memory", options.coordinator_memory),
        "shard_memory": _quantity("--shard-memory", options.shard_memory),
        "worker_memory": _quantity("--worker-memory", options.worker_memory),
        "storage": _quantity("--storage", options.storage),
        "access_mode": options.access_mode,
        "kubernetes_job": f"{name}-worker",
        "shard_index": "labels['apps.kubernetes.io/pod-index']",
        "coordinator_host": f"{name}-coordinator-0",
        "shard_host": f"{name}-shard",
        "shard_subdomain": "",
        "image": _image("--image", options.image),
        "cuda_image": _image("--cuda-image", options.cuda_image),
        "storage_class": "",
        "store_resource": "- store.yaml" if claim else "",
        "store_volume": "- name: store\n  persistentVolumeClaim: {claimName: @{name}-store}",
        "api_ports": "\n".join(f"- {{protocol: TCP, port: {port}}}" for port in _api_ports(options)),
        "store_egress": "",
        "store_env": "",
        "tmp_volume": "- name: tmp\n  emptyDir: {sizeLimit: 1Gi}",
        "data_mount": "",
        "data_volume": "",
    }
    if options.storage_class:
        values["storage_class"] = f"storageClassName: {_object('--storage-class', options.storage_class)}"
    values |= _claim_free(loaded, options)
    if options.data_claim:
        claimed = _object("--data-claim", options.data_claim)
        values["data_mount"] = f"- {{name: data, mountPath: {DATA_FOLDER}, readOnly: true}}"
        values["data_volume"] = f"- name: data\n  persistentVolumeClaim: {{claimName: {claimed}, readOnly: true}}"
    return values


def _claim_free(loaded: LoadedJob, options: KubernetesOptions) -> dict[str, str]:
    """Return the values that differ with an object store, which is remote and needs credentials."""
    secret, port = options.store_secret, options.store_port
    if _has_claim(loaded):
        for flag, found in (("--store-secret", secret), ("--store-port", port)):
            if found not in ("", None):
                raise ConfigurationError(
                    f"flag {flag}: found {found}, and the checkpoints are in a volume claim; allowed: only with an "
                    "object store, such as --set checkpoint.url=s3://BUCKET/FOLDER"
                )
        return {}
    port = _port("--store-port", STORE_PORT if port is None else port)
    values = {
        "store_volume": "# What counts is in the object store.\n- name: store\n  emptyDir: {}",
        "store_egress": f"# The object store.\n- ports:\n    - {{protocol: TCP, port: {port}}}",
    }
    if secret:
        name = _object("--store-secret", secret)
        values["store_env"] = f'# Credentials of the object store.\nenvFrom:\n  - secretRef: {{name: "{name}"}}'
    return values


def _has_claim(loaded: LoadedJob) -> bool:
    return "://" not in loaded.job.checkpoint.url


def _check_data(loaded: LoadedJob, options: KubernetesOptions) -> None:
    """Refuse data in a folder that is not mounted in the pods."""
    for key, path in data_paths(loaded.job):
        if not (options.data_claim and PurePosixPath(path).is_relative_to(DATA_FOLDER)):
            raise ConfigurationError(
                f"{loaded.origins[key]}: {key}: found {path}, which the pods do not have; allowed on Kubernetes: a "
                f"path in {DATA_FOLDER}, where --data-claim CLAIM mounts a volume claim"
            )


def _object_name(job_name: str) -> str:
    """Return a job's name as a valid name of a Kubernetes object."""
    name = re.sub(r"[._-]+", "-", job_name.lower()).strip("-")
    name = name if name[0].isalpha() else f"job-{name}"
    if len(name) > NAME_LENGTH_MAX:
        raise ConfigurationError(
            f"job.name: found {job_name!r}, as an object's name {name} with {len(name)} characters; allowed on "
            f"Kubernetes: {NAME_LENGTH_MAX}"
        )
    return name


def _image(flag: str, reference: str) -> str:
    found = parsed_image(flag, reference)
    if found["digest"]:
        return f"newName: {found['name']}\ndigest: {found['digest']}"
    return f'newName: {found["name"]}\nnewTag: "{found["tag"] or "latest"}"'


def _api_ports(options: KubernetesOptions) -> list[int]:
    return sorted({*API_PORTS, *(_port("--api-port", port) for port in options.api_ports)})


def _port(flag: str, port: int) -> int:
    if not 1 <= port <= PORT_MAX:
        raise ConfigurationError(f"flag {flag}: found {port}; allowed: 1 to {PORT_MAX}")
    return port


def _quantity(flag: str, text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise ConfigurationError(f"flag {flag}: found {text!r}; allowed: a number of bytes such as 512Mi, 2Gi or 1.5G")
    return text


def _object(flag: str, name: str) -> str:
    if not _OBJECT.fullmatch(name):
        raise ConfigurationError(f"flag {flag}: found {name!r}; allowed: lower-case letters, digits, '-' and '.'")
    return name


def earlier_files(folder: Path, files: Collection[str]) -> list[str]:
    """Return the files in a folder that an earlier rendering wrote and the present one does not."""
    # A file counts only if its path is a template's and it begins as that template does, so another program's
    # ``secrets.sh`` does not.
    possible = {SECRETS_PATH, *(path for part in FOLDERS for path in templates(part))}
    return sorted(path for path in possible.difference(files) if _is_rendered(folder / path, template(path)))


def _is_rendered(path: Path, text: str) -> bool:
    beginning = text.partition("@{")[0].encode()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(beginning)) == beginning
