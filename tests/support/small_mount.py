"""A small file system of a test's own, where mounting is permitted, for tests of full disks in several folders."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.waiting import DEADLINE_S


class NotPermitted(Exception):
    """This user, or this container, may not mount."""


@contextmanager
def mounted(size_mib: int) -> Iterator[Path]:
    """Return the folder of a tmpfs of its own; it is unmounted in the end.

    Raises
    ------
    NotPermitted
        If it may not be mounted.
    """
    with tempfile.TemporaryDirectory(prefix="parashard-small-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", folder]
        try:
            mount = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        except FileNotFoundError:
            raise NotPermitted("there is no program mount") from None
        if mount.returncode:
            raise NotPermitted(f"a tmpfs may not be mounted here: {mount.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], timeout=DEADLINE_S, check=True)
