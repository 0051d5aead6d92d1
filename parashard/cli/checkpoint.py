"""`parashard checkpoint`: `create` asks the coordinator, `ls`, `verify` and `export` work on a store alone."""

from __future__ import annotations

import json
import os
import secrets
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import RUN_NAME, Catalogue, CheckpointId, parse_job_id
from parashard.checkpoints.state import plan_of, whole_model
from parashard.checkpoints.verify import damage_in_job, damage_in_shard, damage_in_store, restarts_from
from parashard.cli.main import App
from parashard.cli.options import Coordinator, TlsDir, complete_runs, told_how_to_continue
from parashard.data.data_files import write_rows
from parashard.display.text_table import print_table
from parashard.errors import (
    ConfigurationError,
    DamagedCheckpoint,
    JobFailed,
    NotReady,
    NotStored,
    RetryLater,
    StoreFailed,
    Unreachable,
)
from parashard.job.load import job_of_run
from parashard.launch.run_folders import check_in_progress, coordinator_at, how_it_ended, launcher_of, place_of
from parashard.launch.stored_rows import pieces_of_table, whole_table
from parashard.plan.embedding import as_numpys
from parashard.plan.variables import as_exported
from parashard.process.arguments import finite
from parashard.process.run_files import CHECKPOINTS, JOB_FILE, PREPROCESSING_FILE, beside
from parashard.process.shell import ExitCode
from parashard.protocol.coordinator_client import CoordinatorClient, run_id_in
from parashard.security.given_credentials import credentials_in
from parashard.store import Store, open_store
from parashard.store.arrays import write_arrays

CREATE_POLL_S = 0.1
STOPPED_AT = "stopped at the drained checkpoint"
"""Start of the reason of a run that `create --stop` has stopped."""
PREPROCESSING_BYTES_MAX = 1 << 28
AWAY_S = 15.0  # longer than a coordinator needs to be started again

checkpoint = App(help="Create, list, verify and export checkpoints.", no_args_is_help=True)

Where = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|URL",
        help="A run directory, a name under runs/, or a store; default: the newest run.",
        autocompletion=complete_runs,
    ),
]


@checkpoint.command()
def create(
    where: Coordinator = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=86400, callback=finite, help="How long to wait.")] = 300.0,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop the run once it is stored: it goes on with any number of shards.")
    ] = False,
    tls_dir: TlsDir = None,
) -> None:
    """Pause leasing until every shard has the same steps, and save them all: resharding and export start from that."""
    place = place_of(where)
    check_in_progress(place)
    if stop and launcher_of(Path(place)) is None:
        raise ConfigurationError(f"--stop: {place} is not a run directory of a run in progress on this machine")
    address, credentials = coordinator_at(place), credentials_in(tls_dir)
    client = CoordinatorClient(address, where=place, credentials=credentials)
    asked = pb.CreateCheckpointRequest(run_id=run_id_in(place), request=secrets.randbits(64), stop=stop)
    heard_s = time.monotonic()
    deadline_s = heard_s + timeout_s
    while True:
        try:  # a coordinator that is away may come back; asking again is safe
            with told_how_to_continue(place):
                answer = client.create_checkpoint(asked)
        except NotReady:  # it answers, and not every shard is up
            heard_s = time.monotonic()
        except (RetryLater, JobFailed) as error:
            if stop and launcher_of(Path(place)) is not None:
                heard_s = time.monotonic()  # its processes end
            elif stop and _was_stopped(Path(place)):
                return
            elif isinstance(error, JobFailed) or time.monotonic() - heard_s > AWAY_S:
                raise
        else:
            heard_s = time.monotonic()
            if answer.error:
                raise StoreFailed(f"the checkpoint was not stored: {answer.error}")
            if answer.checkpoint:
                typer.echo(f"{answer.checkpoint}: {answer.steps} steps on every shard")
                return
        if time.monotonic() > deadline_s:
            raise Unreachable(f"no checkpoint after {timeout_s:.0f} s; the coordinator goes on trying")
        time.sleep(CREATE_POLL_S)


def _was_stopped(run_dir: Path) -> bool:
    """Tell whether a run was stopped at a drained checkpoint, and say so if it was."""
    _, reason = how_it_ended(run_dir) or ("", "")
    if reason.startswith(STOPPED_AT):
        typer.echo(reason)
    return reason.startswith(STOPPED_AT)


@checkpoint.command()
def ls(
    where: Where = None, json_: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False
) -> None:
    """List the checkpoints of a run: each shard's, and the drained ones."""
    rows = list(_rows(Catalogue(store_of(where))))
    if json_:
        typer.echo(json.dumps(rows))
        return
    names = ("id", "steps", "round", "size", "written", "")
    print_table(names, map(_cells, rows), right=("steps", "round", "size"))


@checkpoint.command()
def verify(
    where: Where = None,
    id_: Annotated[str | None, typer.Option("--id", help="Only this one, such as p1/s0/i3/c7 or j1.")] = None,
) -> None:
    """Read every byte of every checkpoint; name each damaged file and exit with 1 if there is one."""
    catalogue = Catalogue(store_of(where))
    damaged, damaged_ids = 0, set[CheckpointId]()
    for text in _damage(catalogue, id_, damaged_ids):
        damaged += 1
        typer.echo(f"damaged: {text}")
    for text in restarts_from(catalogue, damaged_ids):
        typer.echo(text)
    checked = id_ or f"{len(catalogue.checkpoints())} of shards, {len(catalogue.job_checkpoints())} drained"
    typer.echo(f"{catalogue.store.url}: {checked}: {f'{damaged} damaged' if damaged else 'every byte verified'}")
    if damaged:
        raise typer.Exit(ExitCode.FAILED)


@checkpoint.command()
def export(
    output: Annotated[
        Path, typer.Option(help="The file to write: FILE.safetensors or FILE.npz; of a table FILE.parquet, too.")
    ],
    where: Where = None,
    id_: Annotated[str | None, typer.Option("--id", help="Which drained checkpoint; default: the newest.")] = None,
    table: Annotated[
        str | None, typer.Option(help="An embedding table in place of the variables: arrays keys and rows.")
    ] = None,
) -> None:
    """Write the whole model of a drained checkpoint into one file, and beside it how inputs are made for it."""
    allowed = (".safetensors", ".npz", *([] if table is None else [".parquet"]))
    if output.suffix not in allowed:
        raise ConfigurationError(f"--output {output}: found {output.suffix!r}; allowed: {', '.join(allowed)}")
    catalogue = Catalogue(store_of(where))
    number = _drained(catalogue, id_)
    job = catalogue.job_manifest(number)
    if table is not None and output.suffix == ".parquet":
        with written_whole(output) as path:
            count = write_rows(path, pieces_of_table(catalogue, job, table))
        typer.echo(f"{output}: {count:,} rows of table {table} of j{number}, after {job.steps} steps")
        return
    if table is not None:
        keys, rows = whole_table(catalogue, job, table)
        write_model(output, {"keys": keys, "rows": rows})
        typer.echo(f"{output}: {len(keys):,} rows of table {table} of j{number}, after {job.steps} steps")
        return
    arrays = as_exported(whole_model(catalogue.store, job), plan_of(catalogue.store, job).variables)
    write_model(output, arrays)
    _write_preprocessing(catalogue.store, beside(output))
    typer.echo(f"{output}: {len(arrays)} variables of j{number}, after {job.steps} steps")


def store_of(where: str | None) -> Store:
    """Return the store of a run directory, or the one at a path or URL."""
    place = place_of(where)
    if "://" in place:
        return open_store(place)
    folder = Path(place)
    if (folder / JOB_FILE).is_file():
        job = job_of_run(folder / JOB_FILE).job  # the environment was applied when the run began
        return open_store(job.checkpoint.url or str(folder / CHECKPOINTS))
    if (folder / RUN_NAME).is_file():
        return open_store(place)
    raise ConfigurationError(
        f"{place}: neither a run directory (no {JOB_FILE}) nor a store of checkpoints (no {RUN_NAME})"
    )


def write_model(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a model's variables as safetensors or .npz, by the file's suffix; whole or not at all."""
    with written_whole(path) as whole:
        if path.suffix == ".npz":
            _write_npz(whole, arrays)
        else:
            write_arrays(whole, arrays)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path; move its file to `path` after the block, or remove it after an error."""
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield whole
            os.replace(whole, path)
        finally:
            whole.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--output {path}: cannot be written: {error}") from None


def _write_preprocessing(store: Store, path: Path) -> None:
    """Copy the preprocessing file of the run's store; older stores and generated data have none."""
    try:
        content = store.read(PREPROCESSING_FILE, PREPROCESSING_BYTES_MAX)
    except NotStored:
        return
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from None


def _write_npz(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write as numpy.savez, which takes names as keywords and so refuses a variable called "file"."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, as_numpys(array), allow_pickle=False)


def _damage(catalogue: Catalogue, id_: str | None, damaged: set[CheckpointId]) -> Iterator[str]:
    if id_ is None:
        return damage_in_store(catalogue, damaged)
    number = parse_job_id(id_)
    return damage_in_shard(catalogue, CheckpointId.parse(id_)) if number is None else damage_in_job(catalogue, number)


def _drained(catalogue: Catalogue, id_: str | None) -> int:
    if id_ is None:
        newest = catalogue.newest_job_manifest()
        if newest is None:
            raise ConfigurationError(
                f"{catalogue.store.url}: there is no drained checkpoint; `parashard checkpoint create` makes one"
            )
        return newest.number
    number = parse_job_id(id_)
    if number is None:
        raise ConfigurationError(f"--id {id_}: only drained checkpoints are exported; allowed: such as j1")
    return number


def _rows(catalogue: Catalogue) -> Iterator[dict[str, Any]]:
    pinned = catalogue.pinned()
    for id_ in catalogue.checkpoints():
        row: dict[str, Any] = {"id": str(id_), "kind": "shard", "pinned": id_.folder in pinned}
        try:
            manifest = catalogue.manifest(id_)
        except NotStored:
            continue  # deleted since it was listed
        except DamagedCheckpoint as error:
            yield {**row, "damage": str(error)}
            continue
        yield {
            **row,
            "steps": len(manifest.steps),
            "round": manifest.round,
            "size_bytes": manifest.size_bytes,
            "written_at": manifest.written_at,
        }
    for number in catalogue.job_checkpoints():
        row = {"id": f"j{number}", "kind": "drained"}
        try:
            job = catalogue.job_manifest(number)
            parts = [catalogue.part_manifest(job, shard) for shard in range(len(job.parts))]
        except DamagedCheckpoint as error:
            yield {**row, "damage": str(error)}
            continue
        yield {
            **row,
            "steps": job.steps,
            "round": parts[0].round,
            "size_bytes": sum(part.size_bytes for part in parts),
            "written_at": job.written_at,
            "parts": [str(CheckpointId.of(part)) for part in parts],
            "final": job.final,
        }


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "damage" in row:
        return (row["id"], "", "", "", "", f"damaged: {row['damage']}")
    note = "drained" if row["kind"] == "drained" else "pinned" if row["pinned"] else ""
    return (
        row["id"],
        f"{row['steps']:,}",
        "" if row["round"] is None else str(row["round"]),
        f"{row['size_bytes']:,}",
        f"{datetime.fromtimestamp(row['written_at']):%Y-%m-%d %H:%M:%S}",
        f"{note}, final" if row.get("final") else note,
    )
