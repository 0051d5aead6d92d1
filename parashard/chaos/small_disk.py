"""Fills the file system of a run directory, if it is a small one, as a tmpfs made for the test.

Refuses any larger one, which other programs may use. Called by the proxied cluster and the runner.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from parashard.errors import ConfigurationError

SMALL_BYTES_MAX = 256 << 20
PIECE_BYTES = (1 << 20, 4096, 1)
FILLER_FILE = "filler"


def check_small(folder: Path) -> None:
    """Refuse a folder whose file system is not a small one."""
    found = os.statvfs(folder)
    size_bytes = found.f_blocks * found.f_frsize
    if size_bytes > SMALL_BYTES_MAX:
        raise ConfigurationError(
            f"--disk fills the file system of the run directory: {folder} is on one of {size_bytes >> 20} MiB; allowed "
            f"are at most {SMALL_BYTES_MAX >> 20} MiB, such as mount -t tmpfs -o size=32m tmpfs FOLDER, with "
            "--run-dir FOLDER/run"
        )


class SmallDisk:
    """The file system of a folder."""

    def __init__(self, folder: Path) -> None:
        self._filler = folder / FILLER_FILE

    def fill(self) -> None:
        """Write until the disk is full to the last byte; at most `SMALL_BYTES_MAX`."""
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            for piece_bytes in PIECE_BYTES:
                piece = bytes(piece_bytes)
                try:
                    while os.fstat(descriptor).st_size < SMALL_BYTES_MAX:
                        os.write(descriptor, piece)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Remove the filler file."""
        with suppress(FileNotFoundError):
            self._filler.unlink()
