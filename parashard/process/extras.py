"""The command that installs an optional package, for errors. No package index has parashard yet: it names the source.

Called by whatever needs a package that is not there.
"""

from __future__ import annotations

import shlex
from pathlib import Path

SOURCE = Path(__file__).parents[2]
"""The source tree that this package runs from, if it does."""


def install(extra: str) -> str:
    """Return the command that installs an extra; PATH stands for a source tree that is not known."""
    if (SOURCE / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(f'{SOURCE}[{extra}]')}"
    return f"pip install 'PATH[{extra}]' (PATH: the source tree of parashard)"
