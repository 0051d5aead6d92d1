"""A job as manifests for Kubernetes: Kustomize's base and overlays, as texts by path.

Owns what of a job decides a manifest's value, and what a job file must not say when it is to run on a cluster. The
manifests themselves are templates beside this file. Writes nothing; called by `parashard.cli_render`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from parashard.errors import ConfigurationError
from parashard.job.layers import Override
from parashard.job.load import LoadedJob, as_toml
from parashard.render.templates import filled, template, templates

STORE_FOLDER = "/var/lib/parashard"
DATA_FOLDER = "/data"
JOB_PATH = "base/job.toml"
NAME_LENGTH_MAX = 40
"""A pod's label has 63 characters: the name, the longest role and the digest of a pod's template."""
FAREWELL_S = 5
"""Time that a process has beyond `cluster.grace_s` to close what it has open."""

_IMAGE = re.compile(
    r"(?P<name>[a-z0-9]+([._:/-]+[a-z0-9]+)*?)(:(?P<tag>[\w][\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_QUANTITY = re.compile(r"[1-9]\d*(\.\d+)?([KMGTPE]i|[kMGTPE])?")
_OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_PODS = ("coordinator", "shard", "worker")
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
)

_WITH_JOB = {
    "restart_policy": template("pods/restart_policy.yaml"),
    "stopped_exit_code": template("pods/stopped_exit_code.yaml"),
}
"""What a pod says that belongs to a Job."""
_WITH_SET = {"restart_policy": "", "stopped_exit_code": ""}
"""The same of one that belongs to a StatefulSet, which starts it again whatever it says."""


@dataclass(frozen=True)
class KubernetesOptions:
    """What manifests need and no job file knows.

    Parameters
    ----------
    image, cuda_image : str
        References of the images, such as ``registry.example.org/team/parashard:0.1.0``.
    shard_memory, worker_memory : str
        Memory of one pod, as Kubernetes writes it: ``2Gi``.
    storage : str
        Size of the checkpoint store's volume claim; unused with a store of objects.
    storage_class : str
        Its storage class; empty: the cluster's default.
    access_mode : str
        ``ReadWriteMany``, or ``ReadWriteOnce`` on a cluster of one node.
    data_claim : str
        Volume claim that is mounted, read-only, at /data; empty: none.
    """

    image: str = "parashard:latest"
    cuda_image: str = "parashard-cuda:latest"
    shard_memory: str = "2Gi"
    worker_memory: str = "2Gi"
    storage: str = "10Gi"
    storage_class: str = ""
    access_mode: str = "ReadWriteMany"
    data_claim: str = ""


def cluster_overrides(loaded: LoadedJob) -> list[Override]:
    """Return what a job has to say on Kubernetes, to be put over what its file says.

    Kubernetes starts processes, and nobody else. A folder for checkpoints is one inside the pods. And since pods do not
    share a machine, an even share of its cores is not what a pod should take: its threads are as many as its CPUs.

    Raises
    ------
    ConfigurationError
        If the file names a folder of this machine for checkpoints.
    """
    job, flag = loaded.job, "of render k8s"
    url = job.checkpoint.url
    if url and "://" not in url:
        raise ConfigurationError(
            f"{loaded.origins['checkpoint.url']}: checkpoint.url: found {url}, a folder of this machine; allowed on "
            'Kubernetes: "" (a volume claim), or the URL of an object store'
        )
    return [
        ("cluster.launcher", "kubernetes", flag),
        ("checkpoint.url", url or f"{STORE_FOLDER}/checkpoints", flag),
        ("cluster.worker_threads", job.cluster.worker_threads or 1, flag),
        ("cluster.shard_threads", job.cluster.shard_threads or 1, flag),
    ]


def render_kubernetes(loaded: LoadedJob, options: KubernetesOptions) -> dict[str, str]:
    """Return the manifests of a job, as text by path below the folder to write them into.

    Parameters
    ----------
    loaded : LoadedJob
        With `cluster_overrides`.
    options : KubernetesOptions
        What no job file knows.

    Raises
    ------
    ConfigurationError
        If the job or the options cannot be run there; the message names the key or the flag.
    """
    job = loaded.job
    if not job.cluster.workers:
        raise ConfigurationError(
            f"{loaded.origins['cluster.workers']}: cluster.workers: found 0; allowed on Kubernetes: 1 to 4096, since a "
            "Job without pods is complete at once"
        )
    _check_data(loaded, options)
    values = _values(loaded, options)
    with_set, with_job = values | _WITH_SET, values | _WITH_JOB
    for pod in _PODS:
        values[f"{pod}_pod"] = filled(template(f"pods/{pod}.yaml"), with_job if pod == "worker" else with_set)
    # A JobSet names its Jobs JOBSET-PART-NUMBER.
    in_set = {
        "shard_index": "annotations['batch.kubernetes.io/job-completion-index']",
        "kubernetes_job": f"{values['name']}-worker-0",
    }
    for pod in ("coordinator", "shard"):
        values[f"{pod}_jobset_pod"] = filled(template(f"pods/{pod}.yaml"), with_job | in_set)
    skipped = set() if _has_claim(loaded) else {"base/store.yaml"}
    paths = [path for folder in ("base", "components", "overlays") for path in templates(folder) if path not in skipped]
    return {path: filled(template(path), values) for path in paths} | {JOB_PATH: as_toml(job)}


def _values(loaded: LoadedJob, options: KubernetesOptions) -> dict[str, str]:
    """Return what the templates name, but for the pods."""
    job, cluster = loaded.job, loaded.job.cluster
    claim = _has_claim(loaded)
    name = _object_name(job.job.name)
    values = {part: template(f"pods/{part}.yaml") for part in _PARTS} | {
        "name": name,
        "shards": str(cluster.shards),
        "workers": str(cluster.workers),
        "max_restarts": str(cluster.max_restarts),
        "grace_s": str(math.ceil(cluster.grace_s) + FAREWELL_S),
        "worker_cpus": str(cluster.worker_threads),
        "shard_cpus": str(cluster.shard_threads),
        "shard_memory": _quantity("--shard-memory", options.shard_memory),
        "worker_memory": _quantity("--worker-memory", options.worker_memory),
        "storage": _quantity("--storage", options.storage),
        "access_mode": options.access_mode,
        "kubernetes_job": f"{name}-worker",
        "shard_index": "labels['apps.kubernetes.io/pod-index']",
        "image": _image("--image", options.image),
        "cuda_image": _image("--cuda-image", options.cuda_image),
        "storage_class": "",
        "store_resource": "- store.yaml" if claim else "",
        "store_volume": "- name: store\n  persistentVolumeClaim: {claimName: @{name}-store}",
        "store_egress": "",
        "tmp_volume": "- name: tmp\n  emptyDir: {sizeLimit: 1Gi}",
        "data_mount": "",
        "data_volume": "",
    }
    if options.storage_class:
        values["storage_class"] = f"storageClassName: {_object('--storage-class', options.storage_class)}"
    if not claim:
        values["store_volume"] = "# What counts is in the object store.\n- name: store\n  emptyDir: {}"
        values["store_egress"] = "# The object store.\n- ports:\n    - {protocol: TCP, port: 443}"
    if options.data_claim:
        claimed = _object("--data-claim", options.data_claim)
        values["data_mount"] = f"- {{name: data, mountPath: {DATA_FOLDER}, readOnly: true}}"
        values["data_volume"] = f"- name: data\n  persistentVolumeClaim: {{claimName: {claimed}, readOnly: true}}"
    return values


def _has_claim(loaded: LoadedJob) -> bool:
    return "://" not in loaded.job.checkpoint.url


def _check_data(loaded: LoadedJob, options: KubernetesOptions) -> None:
    """Refuse data in a folder that the pods do not have."""
    for key in ("data.path", "data.held_out_path"):
        path = getattr(loaded.job.data, key.partition(".")[2], None)
        if isinstance(path, Path) and not (options.data_claim and PurePosixPath(path).is_relative_to(DATA_FOLDER)):
            raise ConfigurationError(
                f"{loaded.origins[key]}: {key}: found {path}, which the pods do not have; allowed on Kubernetes: a "
                f"path in {DATA_FOLDER}, where --data-claim CLAIM mounts a volume claim"
            )


def _object_name(job_name: str) -> str:
    """Return a job's name as Kubernetes lets objects be called."""
    name = re.sub(r"[._-]+", "-", job_name.lower()).strip("-")
    name = name if name[0].isalpha() else f"job-{name}"
    if len(name) > NAME_LENGTH_MAX:
        raise ConfigurationError(
            f"job.name: found {job_name!r}, as an object's name {name} with {len(name)} characters; allowed on "
            f"Kubernetes: {NAME_LENGTH_MAX}"
        )
    return name


def _image(flag: str, reference: str) -> str:
    found = _IMAGE.fullmatch(reference)
    if found is None:
        raise ConfigurationError(f"flag {flag}: found {reference!r}; allowed: NAME, NAME:TAG or NAME@sha256:DIGEST")
    if found["digest"]:
        return f"newName: {found['name']}\ndigest: {found['digest']}"
    return f'newName: {found["name"]}\nnewTag: "{found["tag"] or "latest"}"'


def _quantity(flag: str, text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise ConfigurationError(f"flag {flag}: found {text!r}; allowed: a number of bytes such as 512Mi, 2Gi or 1.5G")
    return text


def _object(flag: str, name: str) -> str:
    if not _OBJECT.fullmatch(name):
        raise ConfigurationError(f"flag {flag}: found {name!r}; allowed: lower-case letters, digits, '-' and '.'")
    return name
