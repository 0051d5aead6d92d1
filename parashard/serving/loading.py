"""Loading: a shard's version out of its checkpoint, from nothing or from the version before it.

Reads of a table only the files that the version before did not name, where these continue them; else all of them, and
compares.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from parashard.checkpoints.catalogue import CheckpointId, place_of
from parashard.checkpoints.manifest import ShardManifest, TableFile
from parashard.checkpoints.row_files import read_change
from parashard.checkpoints.tensors import iterate_tensors, variable_tensor
from parashard.errors import DamagedCheckpoint
from parashard.plan.embedding import floats_of, found_among
from parashard.plan.row_rules import NO_RULES, RowRules
from parashard.serving.published_rows import PublishedRows, RowChange
from parashard.serving.versions import PublishedShard, PublishedTable, ShardVersion, digest_of, token_of
from parashard.store import Store


def load_version(
    store: Store, manifest: ShardManifest, row_elements: Mapping[str, int], before: PublishedShard | None = None
) -> PublishedShard:
    """Return what a checkpoint has, verified."""
    folder = CheckpointId.of(manifest).folder
    named = dict(iterate_tensors(store, folder, manifest, "variables"))
    variables = {p: named[variable_tensor(p)] for p in manifest.held}
    tables = {}
    for name, elements in row_elements.items():
        files = tuple(file for file in manifest.table_files if file.table == name)
        earlier = (
            before.tables[name]
            if before is not None
            else PublishedTable(PublishedRows.empty(elements), token=token_of(()))
        )
        tables[name] = _continued(store, manifest, earlier, files, name)
    digests = {partition: digest_of(values) for partition, values in variables.items()}
    return PublishedShard(ShardVersion.of(manifest), variables, tables, digests)


def _continued(
    store: Store, manifest: ShardManifest, before: PublishedTable, files: tuple[TableFile, ...], name: str
) -> PublishedTable:
    rules = next((rule.rules for rule in manifest.table_rules if rule.table == name), NO_RULES)
    number = len(before.files)
    if files[:number] == before.files:
        table = _applied(store, manifest, before, files)
    else:
        fresh = PublishedTable(PublishedRows.empty(before.rows.row_elements))
        fresh = _applied(store, manifest, fresh, files)
        fresh = _without_ended(fresh, rules, manifest.version)
        table = before.marked(before.rows.replaced(fresh.rows, before.change + 1), files, before.change + 1)
    if not rules.ends_rows and table.rows.rows != dict(manifest.tables).get(name, 0):
        where = place_of(store, CheckpointId.of(manifest).folder)
        raise DamagedCheckpoint(
            f"{where}: the files make {table.rows.rows} rows of table {name!r}, the manifest says "
            f"{dict(manifest.tables).get(name, 0)}"
        )
    return _without_ended(table, rules, manifest.version)


def _applied(
    store: Store, manifest: ShardManifest, table: PublishedTable, files: tuple[TableFile, ...]
) -> PublishedTable:
    """Return a table after the files that it does not have yet, a change for each checkpoint that wrote some."""
    done = len(table.files)
    for layer in _layers(files[done:]):
        change = _change_of(store, manifest, layer, table.rows.row_elements)
        done += len(layer)
        number = table.change + 1
        table = table.marked(table.rows.with_change(change, number), files[:done], number)
    return table


def _without_ended(table: PublishedTable, rules: RowRules, now: int) -> PublishedTable:
    change = table.rows.ended(rules, now)
    if not len(change.gone):
        return table
    number = table.change + 1
    return table.marked(table.rows.with_change(change, number), table.files, number)


def _change_of(store: Store, manifest: ShardManifest, layer: Sequence[TableFile], row_elements: int) -> RowChange:
    changes = []
    for file in layer:
        found = read_change(store, manifest, file)
        if len(found.rows.keys) and found.rows.values.shape[1] != row_elements:
            where = place_of(store, CheckpointId.of(manifest).folder)
            raise DamagedCheckpoint(
                f"{where}: rows of table {file.table!r} have {found.rows.values.shape[1]} elements, the job's have "
                f"{row_elements}"
            )
        values = found.rows.values.reshape(len(found.rows.keys), row_elements)
        changes.append(RowChange(found.rows.keys, floats_of(values), found.rows.last_use, found.gone))
    joined = RowChange(*(np.concatenate(parts) for parts in zip(*changes, strict=True)))
    order = np.argsort(joined.keys, kind="stable")
    keys = joined.keys[order]
    if bool((keys[1:] == keys[:-1]).any()):
        where = place_of(store, CheckpointId.of(manifest).folder)
        raise DamagedCheckpoint(f"{where}: files of table {layer[0].table!r} by one checkpoint have a key twice")
    gone = np.unique(joined.gone)
    gone = gone[~found_among(gone, keys)[1]]  # a row that was gone before the checkpoint and came again is there
    return RowChange(keys, joined.values[order], joined.last_use[order], gone)


def _layers(files: Sequence[TableFile]) -> Iterator[list[TableFile]]:
    """Yield files by the checkpoint that wrote them, the oldest first."""
    for _, layer in itertools.groupby(files, key=lambda file: (file.incarnation, file.number)):
        yield list(layer)
