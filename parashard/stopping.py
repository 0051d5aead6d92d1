"""What a run that was interrupted has saved, and how to continue it: one line for people.

Reads the manifests of the run's checkpoints, once its processes are gone. Decides nothing; called by `parashard.run`.
"""

from __future__ import annotations

import shlex
from functools import reduce
from pathlib import Path

from parashard.checkpoints.catalogue import Catalogue, by_age, parse_job_id
from parashard.checkpoints.manifest import ShardManifest
from parashard.errors import DamagedCheckpoint, NotStored, ParashardError
from parashard.figures import count, counted
from parashard.intervals import IntervalSet
from parashard.store import open_store


def stopped_line(run_dir: Path, checkpoint_url: str, steps_complete: int, steps_total: int) -> str:
    """Return how far a run came, what of that its checkpoints have, and the command that continues it.

    Parameters
    ----------
    run_dir : Path
        Its directory.
    checkpoint_url : str
        Its checkpoint store.
    steps_complete, steps_total : int
        As its coordinator last told; more may have been saved since.
    """
    try:
        saved = saved_steps(Catalogue(open_store(checkpoint_url)))
    except ParashardError as error:
        note = f" (what is saved is not known: {error})"
    else:
        steps_complete = max(steps_complete, saved)
        lost = steps_complete - saved
        recomputed = f" up to step {count(saved)}; {counted(lost, 'step')} will be recomputed"
        note = f" (saved{recomputed if lost else ''})"
    of_all = f" of {count(steps_total)}" if steps_total else ""  # 0: it never told
    return f"stopped at step {count(steps_complete)}{of_all}{note}. Continue: {resume_command(run_dir)}"


def resume_command(run_dir: Path) -> str:
    """Return the command that continues a run."""
    return f"parashard resume {shlex.quote(short_path(run_dir))}"


def short_path(path: Path) -> str:
    """Return a path as people write it here: relative where it lies below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def saved_steps(catalogue: Catalogue) -> int:
    """Return how many steps a run does not compute again when it is resumed: those that every shard has saved.

    In rounds all shards go back to the newest round that each of them has saved (P12); otherwise each begins with its
    own newest checkpoint, and what one of them lacks is computed again (P5).
    """
    record = catalogue.newest_plan()
    if record is None:
        return 0
    source = None if record.source is None else parse_job_id(record.source)
    first = 0 if source is None else catalogue.job_manifest(source).steps
    saved = [_manifests(catalogue, record.version, shard) for shard in range(len(record.plan.shards))]
    if not all(saved):
        return first
    if saved[0][0].round is not None:
        by_round = [{manifest.round: manifest for manifest in manifests} for manifests in saved]
        common = frozenset.intersection(*map(frozenset, by_round))
        return max((len(by_round[0][round_].steps) for round_ in common), default=first)
    newest = [max(manifests, key=by_age).steps for manifests in saved]
    return len(reduce(IntervalSet.intersection, newest))


def _manifests(catalogue: Catalogue, plan_version: int, shard: int) -> list[ShardManifest]:
    found = []
    for id_ in catalogue.shard_checkpoints(plan_version, shard):
        try:
            found.append(catalogue.manifest(id_))
        except (DamagedCheckpoint, NotStored):
            continue  # an earlier one counts
    return found
