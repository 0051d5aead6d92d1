"""How far behind a job what is served or held is, in versions and in seconds.

Pure. Called by servers and subscribers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parashard.checkpoints.catalogue import CheckpointId
from parashard.plan.intervals import IntervalSet
from parashard.serving.versions import ShardVersion


class Behind(NamedTuple):
    """How far behind.

    Parameters
    ----------
    versions : int
        Committed checkpoints that are later than what is held, of the shard that has the most of them.
    seconds : float
        Since the oldest version that is held was committed; 0.0 if the job is done and all of it is held. Of live
        weights: since it was read, or known to be the newest.
    """

    versions: int
    seconds: float


def behind(
    held: Sequence[ShardVersion],
    newest: Sequence[CheckpointId],
    final_steps: int | None,
    now_s: float,
    looked_at: float | None = None,
) -> Behind:
    """Return how far behind the newest checkpoints some versions are.

    Parameters
    ----------
    held : sequence of ShardVersion
        One of each shard.
    newest : sequence of CheckpointId
        The newest committed one of each shard.
    final_steps : int or None
        The job's, if it is done.
    now_s : float
        Seconds since 1970.
    looked_at : float, optional
        Of live weights: when the newest were the shards' own.
    """
    own = {version.id.shard: version.id for version in held}
    versions = 0
    for id_ in newest:
        mine = own.get(id_.shard)
        same_plan = mine is not None and mine.plan_version == id_.plan_version
        if mine is None or mine < id_:
            versions = max(versions, id_.number - (mine.number if mine is not None and same_plan else 0), 1)
    if final_steps is not None and not versions:
        whole = IntervalSet([(0, final_steps)]) if final_steps else IntervalSet()
        if all(version.steps == whole for version in held):
            return Behind(0, 0.0)
    oldest = min((version.written_at for version in held), default=now_s)
    if looked_at is not None and not versions:
        oldest = max(oldest, looked_at)
    return Behind(versions, max(0.0, now_s - oldest))
