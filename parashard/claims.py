"""Claims: incarnation numbers that never repeat, taken by conditional create before a process listens (P3).

Until checkpoints have a store of their own, the store is a folder that every life of the process can reach.
"""

from __future__ import annotations

import os
from pathlib import Path

from parashard.errors import ConfigurationError

CLAIMS_MAX = 1_000_000


def claim_incarnation(folder: Path, name: str) -> int:
    """Claim the next incarnation of a process and return it: 1 for its first life.

    Two processes that claim at once get different numbers: creating a claim's file fails where it exists.

    Raises
    ------
    ConfigurationError
        If the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [int(path.suffix[1:]) for path in folder.glob(f"{name}.*") if path.suffix[1:].isdecimal()]
        for incarnation in range(max(taken, default=0) + 1, CLAIMS_MAX):
            try:
                descriptor = os.open(folder / f"{name}.{incarnation}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            except FileExistsError:
                continue
            os.close(descriptor)
            return incarnation
    except OSError as error:
        raise ConfigurationError(f"{folder}: cannot claim an incarnation of {name}: {error.strerror}") from None
    raise ConfigurationError(f"{folder}: {name} has had {CLAIMS_MAX} lives")
