"""ShardPush: one push as chunks under an attempt id (P4). Knows no transport; called by `parashard.client`."""

from __future__ import annotations

import secrets

from parashard.messages import CHUNK_BYTES_MAX, PushChunk, Slice, Target
from parashard.variables import Float32s


class ShardPush:
    """One push as it goes to one shard.

    Parameters
    ----------
    target : Target
        Whom it is for.
    worker : str
        Who sends it; for the shard's logs.
    step : int
        The push's identity (P1).
    slices : tuple of Slice
        What `content` holds, in order.
    skipped : bool
        True: the empty push of a step that was given up (P6).
    pulled_version : int or None
        The shard's version that the gradient was computed at; None: unknown (P16).
    content : ndarray of float32, shape (elements,)
        The slices end to end; not changed, and not copied before it is sent.
    """

    def __init__(
        self,
        target: Target,
        worker: str,
        step: int,
        slices: tuple[Slice, ...],
        skipped: bool,
        pulled_version: int | None,
        content: Float32s,
    ) -> None:
        self.step = step
        self.attempt = new_attempt()
        self._target = target
        self._worker = worker
        self._slices = slices
        self._skipped = skipped
        self._pulled_version = pulled_version
        self._content = content.data.cast("B")

    @property
    def chunks(self) -> int:
        """Number of chunks; an empty push has one."""
        return max(1, -(-self._content.nbytes // CHUNK_BYTES_MAX))

    def chunk(self, index: int) -> PushChunk:
        """Return a chunk of the present attempt."""
        begin = index * CHUNK_BYTES_MAX
        return PushChunk(
            self._target,
            self._worker,
            self.step,
            self.attempt,
            begin,
            self._content.nbytes,
            self._slices if index == 0 else (),
            self._skipped,
            self._pulled_version,
            self._content[begin : begin + CHUNK_BYTES_MAX],
        )


def new_attempt() -> int:
    """Return a random attempt id (P4)."""
    return secrets.randbits(64)
