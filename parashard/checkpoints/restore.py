"""Restore: the newest checkpoint of a shard that verifies."""

from __future__ import annotations

from collections.abc import Callable

from parashard.checkpoints.catalogue import Catalogue, CheckpointId, Newest
from parashard.checkpoints.manifest import ShardManifest
from parashard.checkpoints.state import ShardState, load
from parashard.errors import DamagedCheckpoint, NotStored, StoreFailed

Skipped = list[tuple[CheckpointId, StoreFailed]]
"""The checkpoints that were skipped, and why: most are damaged."""


def newest_verified(
    catalogue: Catalogue,
    plan_version: int,
    shard: int,
    newest_first_key: Newest,
    usable: Callable[[ShardManifest], bool] = lambda manifest: True,
) -> tuple[ShardState | None, ShardManifest | None, Skipped]:
    """Return the state of a shard's newest checkpoint that verifies, its manifest, and the damaged ones skipped.

    The caller compares the manifest's run and job digest with its own.

    The newest has the greatest key, `by_age`, or in `sync:N` `by_round`. What is not `usable` is neither read nor
    reported as skipped. The round of a damaged manifest is unknown, so some of those may be older than the result.
    Raises `StoreFailed` if the store cannot be listed, or nothing verifies and a checkpoint could not be read: an
    unavailable store must not look like an empty one.
    """
    skipped: Skipped = []
    unanswered: StoreFailed | None = None
    manifests: list[ShardManifest] = []
    for id_ in reversed(catalogue.shard_checkpoints(plan_version, shard)):
        try:
            manifest = catalogue.manifest(id_)
        except NotStored:
            continue  # collected since it was listed
        except StoreFailed as error:
            skipped.append((id_, error))
            unanswered = unanswered or _unless_damaged(error)
        else:
            if usable(manifest):
                manifests.append(manifest)
    for manifest in sorted(manifests, key=newest_first_key, reverse=True):
        try:
            return load(catalogue.store, manifest), manifest, skipped
        except StoreFailed as error:
            skipped.append((CheckpointId.of(manifest), error))
            unanswered = unanswered or _unless_damaged(error)
    if unanswered is not None:
        raise unanswered
    return None, None, skipped


def _unless_damaged(error: StoreFailed) -> StoreFailed | None:
    return None if isinstance(error, DamagedCheckpoint) else error
