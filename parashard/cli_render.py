"""The commands `parashard render`: a job as manifests for a platform that runs containers.

Parses, calls, writes files, prints; decides nothing. Registered in `parashard.cli`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from parashard.errors import ConfigurationError
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.render.kubernetes import KubernetesOptions, cluster_overrides, render_kubernetes

render_app = typer.Typer(help="Write a job as manifests for a platform.", no_args_is_help=True)

_DEFAULT = KubernetesOptions()


class AccessMode(StrEnum):
    """How many machines may mount the store's volume."""

    MANY = "ReadWriteMany"
    ONE = "ReadWriteOnce"


@render_app.callback()
def render() -> None:
    """Write a job as manifests for a platform that runs containers."""


@render_app.command()
def k8s(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")],
    output: Annotated[Path | None, typer.Option(help="Folder to write; default: k8s-JOB, after the file.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key, such as cluster.workers=8.")
    ] = None,
    image: Annotated[str, typer.Option(help="The image.")] = _DEFAULT.image,
    cuda_image: Annotated[str, typer.Option(help="The image of workers on GPUs.")] = _DEFAULT.cuda_image,
    shard_memory: Annotated[str, typer.Option(help="Memory of a shard's pod.")] = _DEFAULT.shard_memory,
    worker_memory: Annotated[str, typer.Option(help="Memory of a worker's pod.")] = _DEFAULT.worker_memory,
    storage: Annotated[str, typer.Option(help="Size of the checkpoints' volume claim.")] = _DEFAULT.storage,
    storage_class: Annotated[str, typer.Option(help="Its storage class; default: the cluster's.")] = "",
    access_mode: Annotated[
        AccessMode, typer.Option(help="ReadWriteOnce does on a cluster of one node.")
    ] = AccessMode.MANY,
    data_claim: Annotated[str, typer.Option(metavar="CLAIM", help="Volume claim with the data, for /data.")] = "",
) -> None:
    """Write Kustomize's base and overlays for a job."""
    sets = [parse_set(text) for text in set_ or ()]
    loaded = load_job(job, [*sets, *cluster_overrides(load_job(job, sets))])
    options = KubernetesOptions(
        image=image,
        cuda_image=cuda_image,
        shard_memory=shard_memory,
        worker_memory=worker_memory,
        storage=storage,
        storage_class=storage_class,
        access_mode=access_mode.value,
        data_claim=data_claim,
    )
    folder = output or Path(f"k8s-{job.stem}")
    _write(folder, render_kubernetes(loaded, options))
    typer.echo(f"{folder}: kubectl apply -k {folder / 'base'}, or one of {folder / 'overlays'}")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files below a folder, over what earlier calls left there."""
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None
