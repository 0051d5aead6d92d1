"""Read an unfinished run's saved progress from its checkpoints' manifests, and say in one line how to resume it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

from parashard.checkpoints.catalogue import Catalogue, by_age, parse_job_id
from parashard.checkpoints.manifest import ShardManifest
from parashard.checkpoints.retention import StoredCheckpoint
from parashard.errors import DamagedCheckpoint, NotStored, ParashardError
from parashard.figures import count, counted
from parashard.launch.programs import NOT_RESUMED, program_of
from parashard.launch.run_folders import write_report
from parashard.plan.intervals import IntervalSet
from parashard.process.run_files import short_path
from parashard.store import open_store

Saved = list[IntervalSet] | ParashardError
"""The steps that each shard has when its run is resumed (empty: nothing is saved), or why that is unknown."""


def saved_in(checkpoint_url: str) -> Saved:
    """Return the saved steps in the checkpoint store of a run whose processes are gone."""
    try:
        return saved_by_shard(Catalogue(open_store(checkpoint_url)))
    except ParashardError as error:
        return error


def stopped_line(run_dir: Path, saved: Saved, steps_complete: int, steps_total: int) -> str:
    """Return a run's progress as its coordinator last reported it, how much is saved, and the command to resume it."""
    if isinstance(saved, ParashardError):
        note = f" (what is saved is not known: {saved})"
    else:
        in_all = steps_in_all(saved)
        steps_complete = max(steps_complete, in_all)
        lost = steps_complete - in_all
        recomputed = f" up to step {count(in_all)}; {counted(lost, 'step')} will be recomputed"
        note = f" (saved{recomputed if lost else ''})"
    of_all = f" of {count(steps_total)}" if steps_total else ""  # 0: never reported
    return f"stopped at step {count(steps_complete)}{of_all}{note}. Continue: {resume_command(run_dir)}"


def with_continuation(run_dir: Path, report: Mapping[str, Any], reason: str) -> str:
    """Return why a run ended, and how to resume it if it was stopped."""
    if report.get("state") != "stopped":
        return reason
    return f"{reason}. Continue: {resume_command(run_dir)}"


def report_of_saved(run_dir: Path, report: dict[str, Any], saved: Saved) -> dict[str, Any]:
    """Update a report with the steps that shards have saved since it was written; write and return it."""
    if not report or not saved or isinstance(saved, ParashardError):
        return report
    corrected = {**report, "steps_applied": [len(steps) for steps in saved]}
    with suppress(OSError):  # a full disk: the summary is right nevertheless, and a resumed run writes a new report
        write_report(run_dir, corrected)
    return corrected


def resume_command(run_dir: Path) -> str:
    """Return the command that resumes a run, or the call of a program without a script that does."""
    program = program_of(run_dir)
    if program is not None and program.call == NOT_RESUMED:
        return f"start its program anew: {NOT_RESUMED} does not go on with a run"
    if program is not None and not program.script:
        return f"{program.call}(..., resume=True)"
    return f"parashard resume {shlex.quote(short_path(run_dir))}"


def steps_in_all(saved: Sequence[IntervalSet]) -> int:
    """Return how many steps a resumed run does not recompute: those that every shard has saved."""
    return len(reduce(IntervalSet.intersection, saved)) if saved else 0


def saved_by_shard(catalogue: Catalogue) -> list[IntervalSet]:
    """Return the steps that each shard has when its run is resumed; empty without a plan."""
    # In `sync:N` all shards restore the newest round that each of them has saved; otherwise each restores its own
    # newest checkpoint, and steps that one of them lacks are computed again.
    record = catalogue.newest_plan()
    if record is None:
        return []
    source = None if record.source is None else parse_job_id(record.source)
    first = IntervalSet([(0, catalogue.job_manifest(source).steps)]) if source is not None else IntervalSet()
    saved = [_manifests(catalogue, record.version, shard) for shard in range(len(record.plan.shards))]
    if not any(manifest.round is not None for manifests in saved for manifest in manifests):
        return [max(manifests, key=by_age).steps if manifests else first for manifests in saved]
    by_round = [{manifest.round: manifest for manifest in manifests} for manifests in saved]
    common = frozenset.intersection(*map(frozenset, by_round))
    newest = max(common, key=lambda round_: len(by_round[0][round_].steps), default=None)
    return [first if newest is None else manifests[newest].steps for manifests in by_round]


def restorable_in_all(catalogue: Catalogue, keep: int, *, after_damage: bool = True) -> IntervalSet:
    """Return the steps that are in every checkpoint that a shard might be restored from, in `async` and `ssp`."""
    # None before each shard has `keep` checkpoints: it might be restored from the initial values. With `after_damage`
    # none, either, before it has checkpoints of two chains, which one damaged file cannot both break. A shard without
    # table rows that keeps only one checkpoint never has two, and is exempt.
    record = catalogue.newest_plan()
    saved = [_manifests(catalogue, record.version, shard) for shard in range(len(record.plan.shards))] if record else []
    if not saved or any(len(manifests) < keep for manifests in saved):
        return IntervalSet()
    if after_damage and any(_is_one_chain(manifests, keep) for manifests in saved):
        return IntervalSet()
    return reduce(IntervalSet.intersection, [manifest.steps for manifests in saved for manifest in manifests])


def _is_one_chain(manifests: Sequence[ShardManifest], keep: int) -> bool:
    """Tell whether one damaged file can break all of a shard's checkpoints, though more chains would be kept."""
    held = [StoredCheckpoint.of(manifest) for manifest in manifests]
    chains = {one.rows_since or one.id for one in held}
    return len(chains) < 2 and (keep > 1 or any(one.rows_since for one in held))


def _manifests(catalogue: Catalogue, plan_version: int, shard: int) -> list[ShardManifest]:
    found = []
    for id_ in catalogue.shard_checkpoints(plan_version, shard):
        try:
            found.append(catalogue.manifest(id_))
        except (DamagedCheckpoint, NotStored):
            continue  # an earlier one counts
    return found
