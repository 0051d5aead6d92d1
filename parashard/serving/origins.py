"""Origins: a run directory or a coordinator's address, and the run behind it that is to be served.

Owns where job, store and shards are learnt from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from parashard.checkpoints.catalogue import RUN_NAME, Catalogue
from parashard.client.pulled_rows import TableSet
from parashard.errors import ConfigurationError
from parashard.job.embeddings import tables_of
from parashard.job.load import job_from_toml
from parashard.job.schema import Job
from parashard.launch.run_folders import how_it_ended, place_of, resumed_job, run_named
from parashard.process.run_files import CHECKPOINTS
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.security.credentials import Credentials
from parashard.serving.checkpoint_watcher import CheckpointWatcher
from parashard.serving.served import POLL_S, SLOW_POLL_S, ServedRun
from parashard.serving.shard_watcher import LiveSource, ShardWatcher
from parashard.store import open_store

Tell = Callable[[str], None]


class Origin(NamedTuple):
    """What is served, and where it comes from.

    Parameters
    ----------
    run : ServedRun
        Nothing of it is read yet.
    run_dir : Path or None
        None: a coordinator's address was given.
    """

    run: ServedRun
    run_dir: Path | None


def origin_of(place: str, *, fresh: bool, credentials: Credentials | None, tell: Tell) -> Origin:
    """Return the run at a place."""
    if is_address(place):
        return Origin(_served_by(place, "", fresh=fresh, credentials=credentials, tell=tell), None)
    run_dir = run_named(place)
    if fresh:
        ended = how_it_ended(run_dir)
        if ended is not None:
            raise ConfigurationError(
                f"{run_dir}: the run is {ended[0]}, and its shards are gone with it; allowed: to serve it without "
                "--fresh, which serves what they saved last"
            )
        address = find_coordinator(str(run_dir))
        return Origin(_served_by(address, str(run_dir), fresh=True, credentials=credentials, tell=tell), run_dir)
    return Origin(run_of(run_dir, resumed_job(run_dir, []).job), run_dir)


def is_address(place: str) -> bool:
    """Tell whether a place is host:port, and no run."""
    host, _, port = place.rpartition(":")
    return bool(host) and port.isdecimal() and not Path(place_of(place)).is_dir()


def run_of(run_dir: Path, job: Job) -> ServedRun:
    """Return the committed versions of the run of a directory, to be served."""
    return _committed(job.checkpoint.url or str(run_dir / CHECKPOINTS), _tables(job), job.job.name)


def _served_by(address: str, where: str, *, fresh: bool, credentials: Credentials | None, tell: Tell) -> ServedRun:
    coordinator = CoordinatorClient(address, where=where, credentials=credentials, tell=tell)
    reply = coordinator.get_job()
    job = job_from_toml(reply.job_toml)
    if fresh:
        coordinator.retry_budget_s = 0.0  # the server looks again by itself, and says meanwhile what is wrong
        source = LiveSource(coordinator, credentials)
        return ServedRun(ShardWatcher(source, _tables(job)), _tables(job), job.job.name)
    coordinator.close()
    run = Catalogue(open_store(reply.checkpoint_url)).run()
    if run is None or run.run_id != reply.run_id:
        found = "there is no run" if run is None else f"run {run.run_id} is there"
        raise ConfigurationError(
            f"{address} says that the checkpoints of run {reply.run_id} are in {reply.checkpoint_url}, and {found}; "
            "allowed: a store that this machine reaches by the same name, or --fresh"
        )
    return _committed(reply.checkpoint_url, _tables(job), job.job.name)


def _committed(url: str, tables: TableSet, name: str) -> ServedRun:
    store = open_store(url)
    elements = {table: one.row_elements for table, one in tables.by_name.items()}
    poll_s = POLL_S if store.local_path(RUN_NAME) is not None else SLOW_POLL_S
    return ServedRun(CheckpointWatcher(store, elements), tables, name, poll_s)


def _tables(job: Job) -> TableSet:
    return TableSet(tables_of(job), job.job.seed)
