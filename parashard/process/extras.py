"""The command that installs an optional package, for errors: from its source, as no package index has parashard."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import Any

from parashard.errors import ConfigurationError

SOURCE = Path(__file__).parents[2]
"""The source tree that this package runs from, if it does."""


def install(extra: str) -> str:
    """Return the command that installs an extra; PATH stands for a source tree that is not known."""
    if (SOURCE / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(f'{SOURCE}[{extra}]')}"
    return f"pip install 'PATH[{extra}]' (PATH: the source tree of parashard)"


def pyarrow_for(what: str, module: str) -> tuple[Any, Any]:
    """Return pyarrow and a module of it; ConfigurationError, where it cannot be imported, says that `what` needs it."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise ConfigurationError(
            f"{what} need pyarrow, which cannot be imported ({error}); run: {install('parquet')}"
        ) from error
