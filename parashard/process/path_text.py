"""Display form of paths in messages."""

from __future__ import annotations

import os
from pathlib import Path


def short_path(path: str | Path) -> str:
    """Return a path as a user would type it: relative where it lies below the working directory."""
    absolute, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, here) if absolute.startswith(f"{here}{os.sep}") else str(path)
