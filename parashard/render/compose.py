"""A job as a compose file: a service for each shard, one for the workers, and certificates for all of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from parashard.errors import ConfigurationError
from parashard.job.load import LoadedJob
from parashard.render.common import check_runnable, data_paths, filled, leave_s, parsed_image, template

SHARDS_MAX = 32
"""Number of folders for shards' certificates in the image."""
DOCKERFILE = "deploy/docker/Dockerfile"
OWN_KEYS = frozenset({"cluster.launcher", "cluster.shards", "cluster.workers"})
"""Keys of the job file that the compose file sets."""
_PATH = re.compile(r"[\w./+@ =,~-]+")
INSECURE, SECURE = "--insecure", "--tls-dir=/tls"


def source_tree() -> Path | None:
    """Return the source tree that contains this package, if any."""
    root = Path(__file__).resolve().parent.parent.parent
    return root if (root / DOCKERFILE).is_file() else None


def render_compose(
    loaded: LoadedJob,
    folder: Path,
    *,
    image: str = "parashard",
    cuda_image: str = "parashard-cuda",
    source: Path | None = None,
    sets: Sequence[str] = (),
) -> str:
    """Return the compose file of a job, with paths relative to `folder`, where it will be."""
    # `source` is the source tree, to build the images and for the profile `monitoring`; None: neither. `sets` are
    # KEY=VALUE, over the job file.
    _check(loaded)
    cluster = loaded.job.cluster
    secure = not cluster.insecure
    sets = [text for text in sets if text.partition("=")[0].strip() not in OWN_KEYS]
    names = ["coordinator", "operator", "worker", *(f"shard-{index}" for index in range(cluster.shards))]
    values = {
        "build_flag": " --build" if source else "",
        "credentials": SECURE if secure else f"{INSECURE} # open to every host on the network below",
        "image": parsed_image("--image", image)[0],
        "cuda_image": parsed_image("--cuda-image", cuda_image)[0],
        "build": "",
        "build_cuda": "",
        "monitoring": "",
        "metrics_volume": "",
        "grace_s": str(leave_s(loaded.job)),
        "job_folder": _seen_from(folder, loaded.path.parent),
        "job_file": loaded.path.name,
        "shards": str(cluster.shards),
        "workers": str(cluster.workers),
        "sets": "".join(f"- {json.dumps(f'--set={text}').replace('$', '$$')}\n" for text in sets),
        "worker_tls": _tls("worker") if secure else "",
        "coordinator_tls": _tls("coordinator") + "- tls-operator:/operator:ro" if secure else "",
        "certificates": template("compose/certificates.yaml") if secure else "",
        "certificate_volumes": "".join(f"- tls-{name}:/tls/{name}\n" for name in names),
        "tls_volumes": "".join(f"{name}: {{}}\n" for name in ["authority", *(f"tls-{name}" for name in names)])
        if secure
        else "",
        "after_certificates": template("compose/after_certificates.yaml") if secure else "",
    }
    values |= _environments(secure=secure, remote="://" in loaded.job.checkpoint.url)
    if source:
        of_source = {"source": _seen_from(folder, source)}
        for key, target in (("build", "cpu"), ("build_cuda", "cuda")):
            values[key] = filled(template("compose/build.yaml"), of_source | {"target": target})
        values["monitoring"] = filled(template("compose/monitoring.yaml"), of_source)
        values["metrics_volume"] = "metrics: {}"
    shard = template("compose/shard.yaml")
    values["shard_services"] = "".join(
        filled(shard, {"index": str(index), "shard_tls": _tls(f"shard-{index}") if secure else ""})
        for index in range(cluster.shards)
    )
    return filled(template("compose/compose.yaml"), values)


def _environments(*, secure: bool, remote: bool) -> dict[str, str]:
    """Return the services' environment: an operator's certificate, an object store's credentials."""
    store = "environment: *store" if remote else ""
    return {
        "store_environment": template("compose/store_environment.yaml") if remote else "",
        "store_merge": "<<: *store, " if remote else "",
        "shard_environment": store,
        "coordinator_environment": template("compose/operator_environment.yaml") if secure else store,
    }


def _tls(name: str) -> str:
    return f"- tls-{name}:/tls:ro\n"


def _seen_from(folder: Path, path: Path) -> str:
    """Return a path relative to the compose file, beginning with a dot as compose requires."""
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith(".") else f"./{relative}"


def _check(loaded: LoadedJob) -> None:
    """Refuse a job that needs more of the host than the job file's folder."""
    job, origins, here = loaded.job, loaded.origins, loaded.path.parent
    if not 1 <= job.cluster.shards <= SHARDS_MAX:
        raise ConfigurationError(
            f"{origins['cluster.shards']}: cluster.shards: found {job.cluster.shards}; allowed in a compose file: "
            f"1 to {SHARDS_MAX}"
        )
    check_runnable(loaded, "in a compose file", "a volume")
    if not _PATH.fullmatch(str(loaded.path)):
        raise ConfigurationError(
            f"job file {str(loaded.path)!r}: a compose file cannot name it; allowed: letters, digits, spaces, ./+@=,~_-"
        )
    for key, path in data_paths(job):
        if not path.is_relative_to(here):
            raise ConfigurationError(
                f"{origins[key]}: {key}: found {path}, which the containers do not have; allowed in a compose file: a "
                f"path in the job file's folder, {here}, relative to it"
            )
