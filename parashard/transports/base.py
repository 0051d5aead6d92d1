"""The transport seam: frames in, frames out. A transport knows addresses and deadlines, never what a frame says."""

from __future__ import annotations

from typing import Protocol


class Reply(Protocol):
    """A frame that is under way."""

    def result(self) -> bytes:
        """Wait for the frame, until the call's deadline.

        Raises
        ------
        ParashardError
            What the shard answered, with its address; `Unreachable` where it did not answer in time.
        """


class Transport(Protocol):
    """A connection to one shard. Calls may be made from several threads."""

    def push(self, frame: bytes, deadline_s: float) -> Reply:
        """Send a push frame."""

    def pull(self, frame: bytes, deadline_s: float) -> Reply:
        """Send a pull frame."""

    def close(self) -> None:
        """Release the connection; replies under way end with `Unreachable`."""
