"""Assemblies: pushes of several chunks, put together under an attempt id and handed on whole (P4).

Pure: `now_s` is an argument. Knows offsets and bytes, not variables: `parashard_server.core.shard` has checked the
slices before an assembly opens. The first chunk reserves the memory of the whole push
(`parashard_server.serving.push_memory`) or is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from parashard.errors import MalformedFrame, QueueFull, UnknownAttempt
from parashard.plan.intervals import IntervalSet
from parashard.protocol.messages import PushChunk, Slice
from parashard_server.serving.push_memory import PushMemory

IDLE_ASSEMBLY_S = 30.0
SUPERSEDED_S = 1.0


@dataclass
class Assembly:
    """The bytes of one attempt that have arrived."""

    step: int
    attempt: int
    slices: tuple[Slice, ...]
    skipped: bool
    pulled_version: int | None
    content: bytearray
    touched_s: float
    peer: str
    arrived: IntervalSet = field(default_factory=IntervalSet)

    @property
    def complete(self) -> bool:
        """Every byte has arrived."""
        return len(self.arrived) == len(self.content)


class Assemblies:
    """The assemblies in progress, within the shard's budget.

    Parameters
    ----------
    memory : PushMemory
        Where their contents are counted, and each peer has its share.

    Attributes
    ----------
    held_bytes : int
        Bytes of all contents.
    """

    def __init__(self, memory: PushMemory) -> None:
        self._open: dict[tuple[int, int], Assembly] = {}
        self.memory = memory
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, chunk: PushChunk, now_s: float) -> Assembly | None:
        """Take a chunk; return the assembly when this chunk completes it, else None.

        A chunk that arrives twice changes nothing: chunks of one attempt carry the same bytes.

        Raises
        ------
        QueueFull
            If the memory of a new push is not to be had; nothing was reserved.
        UnknownAttempt
            If this is a later chunk of an attempt that is not in progress.
        MalformedFrame
            If the chunk does not fit into the push that its first chunk announced.
        """
        key = (chunk.step, chunk.attempt)
        assembly = self._open.get(key)
        if assembly is None and chunk.offset_bytes != 0:
            raise UnknownAttempt(f"step {chunk.step}: attempt {chunk.attempt:#x} is not in progress here")
        begin, end = chunk.offset_bytes, chunk.offset_bytes + len(chunk.payload)
        size_bytes = chunk.total_bytes if assembly is None else len(assembly.content)
        if chunk.total_bytes != size_bytes or end > size_bytes:
            raise MalformedFrame(
                f"step {chunk.step}: bytes [{begin}, {end}) of {chunk.total_bytes} do not fit into a push of "
                f"{size_bytes} bytes"
            )
        if assembly is None:
            self._reserve(chunk, now_s)
            assembly = Assembly(
                chunk.step,
                chunk.attempt,
                chunk.slices,
                chunk.skipped,
                chunk.pulled_version,
                self._room(chunk),
                now_s,
                chunk.peer,
            )
            self._open[key] = assembly
        assembly.content[begin:end] = chunk.payload
        assembly.arrived.add_range(begin, end)
        assembly.touched_s = now_s
        return assembly if assembly.complete else None

    def drop_step(self, step: int) -> bool:
        """Forget every attempt of a step, applied or refused as a whole; return whether there was one."""
        keys = [key for key in self._open if key[0] == step]
        for key in keys:
            self._forget(key)
        return bool(keys)

    def clear(self) -> None:
        """Forget all of them, at the end of the incarnation that they were pushed to."""
        for key in list(self._open):
            self._forget(key)

    def expire(self, now_s: float) -> None:
        """Forget assemblies that no chunk has touched for IDLE_ASSEMBLY_S."""
        for key in [k for k, a in self._open.items() if now_s - a.touched_s > IDLE_ASSEMBLY_S]:
            self._forget(key)

    def _reserve(self, chunk: PushChunk, now_s: float) -> None:
        self.expire(now_s)
        if not self.memory.has_room(chunk.peer, chunk.total_bytes, now_s):
            self._forget_superseded(chunk.step, now_s)
        if not self.memory.took(chunk.peer, chunk.total_bytes, now_s):
            raise self.memory.full(chunk.total_bytes)

    def _forget_superseded(self, step: int, now_s: float) -> None:
        """Forget attempts of a step that nobody sends any more: a new one must not wait for the old one to expire."""
        for key in [k for k, a in self._open.items() if k[0] == step and now_s - a.touched_s > SUPERSEDED_S]:
            self._forget(key)

    def _room(self, chunk: PushChunk) -> bytearray:
        try:
            content = bytearray(chunk.total_bytes)
        except MemoryError:
            self.memory.give_back(chunk.peer, chunk.total_bytes)
            raise QueueFull(f"this machine has no memory for a push of {chunk.total_bytes} bytes now") from None
        self.held_bytes += chunk.total_bytes
        return content

    def _forget(self, key: tuple[int, int]) -> None:
        gone = self._open.pop(key)
        self.held_bytes -= len(gone.content)
        self.memory.give_back(gone.peer, len(gone.content))
