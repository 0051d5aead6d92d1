"""The commands `parashard render`: a job as manifests for a container platform, or as a script for Slurm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from parashard.cli.main import App, folder_of
from parashard.cli.options import Sets
from parashard.errors import ConfigurationError
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.launch.run_folders import RUNS
from parashard.render.compose import render_compose, source_tree
from parashard.render.kubernetes import (
    SECRETS_PATH,
    STORE_PORT,
    Certificates,
    KubernetesOptions,
    certificates_of,
    cluster_overrides,
    earlier_files,
    render_kubernetes,
)
from parashard.render.slurm import render_slurm

render = App(
    help="Write a job as manifests for a platform of containers, or as a script for Slurm.", no_args_is_help=True
)

_DEFAULT = KubernetesOptions()


class AccessMode(StrEnum):
    """How many machines may mount the store's volume."""

    MANY = "ReadWriteMany"
    ONE = "ReadWriteOnce"


@render.callback()
def _render() -> None:
    """Write a job as manifests for a platform of containers, or as a script for Slurm."""


@render.command()
def k8s(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")],
    output: Annotated[
        Path | None,
        typer.Option(parser=folder_of, metavar="FOLDER", help="Folder to write; default: k8s-JOB, after the file."),
    ] = None,
    set_: Sets = None,
    image: Annotated[str, typer.Option(help="The image.")] = _DEFAULT.image,
    cuda_image: Annotated[
        str | None, typer.Option(help="The image of workers on GPUs.", show_default=_DEFAULT.cuda_image)
    ] = None,
    coordinator_memory: Annotated[
        str, typer.Option(help="Memory of the coordinator's pod.")
    ] = _DEFAULT.coordinator_memory,
    shard_memory: Annotated[str, typer.Option(help="Memory of a shard's pod.")] = _DEFAULT.shard_memory,
    worker_memory: Annotated[str, typer.Option(help="Memory of a worker's pod.")] = _DEFAULT.worker_memory,
    storage: Annotated[str, typer.Option(help="Size of the checkpoints' volume claim.")] = _DEFAULT.storage,
    storage_class: Annotated[str, typer.Option(help="Its storage class; default: the cluster's.")] = "",
    access_mode: Annotated[
        AccessMode, typer.Option(help="ReadWriteOnce does on a cluster of one node.")
    ] = AccessMode.MANY,
    data_claim: Annotated[str, typer.Option(metavar="CLAIM", help="Volume claim with the data, for /data.")] = "",
    store_secret: Annotated[
        str, typer.Option(metavar="SECRET", help="Secret with AWS_ACCESS_KEY_ID, ... for an object store.")
    ] = "",
    store_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port of the object store.", show_default=str(STORE_PORT))
    ] = None,
    api_port: Annotated[
        list[int] | None,
        typer.Option(metavar="PORT", help="Port of the API server, besides 443 and 6443; may be given many times."),
    ] = None,
    certificates: Annotated[
        Certificates | None,
        typer.Option(help="Who makes them; default: cert-manager, or none with cluster.insecure."),
    ] = None,
) -> None:
    """Write Kustomize's base and overlays for a job."""
    sets = [parse_set(text) for text in set_ or ()]
    loaded = load_job(job, [*sets, *cluster_overrides(load_job(job, sets))])
    options = KubernetesOptions(
        image=image,
        cuda_image=_DEFAULT.cuda_image if cuda_image is None else cuda_image,
        coordinator_memory=coordinator_memory,
        shard_memory=shard_memory,
        worker_memory=worker_memory,
        storage=storage,
        storage_class=storage_class,
        access_mode=access_mode.value,
        data_claim=data_claim,
        store_secret=store_secret,
        store_port=store_port,
        api_ports=tuple(api_port or ()),
        certificates=certificates,
    )
    folder = output or Path(f"k8s-{job.stem}")
    files = render_kubernetes(loaded, options)
    _write(folder, files)
    _remove(folder, earlier_files(folder, files))
    if cuda_image is None and image != _DEFAULT.image:
        typer.echo(f"{folder}: the overlays with GPUs have the image {options.cuda_image}: --cuda-image sets it")
    if certificates_of(loaded, certificates) is Certificates.SECRETS:
        typer.echo(f"{folder}: first sh {folder / SECRETS_PATH} FOLDER, for the certificates")
    typer.echo(f"{folder}: kubectl apply -k {folder / 'base'}, or one of {folder / 'overlays'}")


@render.command()
def compose(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file; its folder is what containers see.")],
    output: Annotated[
        Path | None,
        typer.Option(parser=folder_of, metavar="FOLDER", help="Folder to write; default: compose-JOB, after the file."),
    ] = None,
    set_: Sets = None,
    image: Annotated[str, typer.Option(help="The image.")] = "parashard",
    cuda_image: Annotated[str, typer.Option(help="The image of workers on GPUs.")] = "parashard-cuda",
) -> None:
    """Write a compose file for a job: containers on this machine, inside mutual TLS."""
    sets = list(set_ or ())
    loaded = load_job(job, [parse_set(text) for text in sets], environ={})
    folder = output or Path(f"compose-{job.stem}")
    source = source_tree()
    text = render_compose(loaded, folder.absolute(), image=image, cuda_image=cuda_image, source=source, sets=sets)
    _write(folder, {"compose.yaml": text})
    build = " --build" if source else ""
    typer.echo(f"{folder}: docker compose -f {folder / 'compose.yaml'} up{build}")


@render.command()
def slurm(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file, in a folder that all nodes see.")],
    output: Annotated[
        Path | None,
        typer.Option(parser=folder_of, metavar="FILE", help="Script to write; default: slurm-JOB.sh, after the file."),
    ] = None,
    set_: Sets = None,
    run_dir: Annotated[
        str, typer.Option(metavar="FOLDER", help="The run's own folder, which all nodes see; default: runs/JOB-slurm.")
    ] = "",
    server_options: Annotated[
        str, typer.Option(metavar="WORDS", help="Options of sbatch for the coordinator and the shards.")
    ] = "",
    worker_options: Annotated[str, typer.Option(metavar="WORDS", help="Options of sbatch for the workers.")] = "",
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A script of your own with @{...} where values belong.")
    ] = None,
) -> None:
    """Write a batch script for Slurm, which submits, scales and cancels a job: ./slurm-JOB.sh up."""
    sets = list(set_ or ())
    on_slurm = ("cluster.launcher", "external", "of render slurm")
    loaded = load_job(job, [*map(parse_set, sets), on_slurm], environ={})
    path = output or Path(f"slurm-{job.stem}.sh")
    if path.resolve() in (job.resolve(), template and template.resolve()):
        raise ConfigurationError(f"flag --output: found {path}, which render reads; allowed: another file")
    folder = Path(run_dir or RUNS / f"{loaded.job.job.name}-slurm").absolute()
    text = render_slurm(
        loaded,
        path.name,
        folder,
        server_options=server_options,
        worker_options=worker_options,
        own_template=template,
        sets=sets,
    )
    _write(path.parent, {path.name: text})
    path.chmod(0o755)
    typer.echo(f"{path}: bash {path} up, where sbatch is; all nodes must see {folder}")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files below a folder, over those of earlier calls."""
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None


def _remove(folder: Path, names: Iterable[str]) -> None:
    """Remove files of an earlier call that this one does not write, and say so."""
    for name in names:
        path = folder / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be removed: {error.strerror}") from None
        typer.echo(f"{folder}: removed {name}, which an earlier call wrote and this one does not")
