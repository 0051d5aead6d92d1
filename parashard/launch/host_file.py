"""Host files, and the `ssh` command for their hosts: for `--on ssh:HOSTFILE` and `parashard doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from parashard.errors import ConfigurationError

SSH = ("ssh", "-Tax", "-oBatchMode=yes", "-oConnectTimeout=10", "-oControlPath=none", "-oClearAllForwardings=yes")
"""Prompts for nothing, shares no connection with others, and forwards nothing."""
HOSTS_MAX = 256


class NamedHost(NamedTuple):
    """A line of a host file."""

    name: str
    """As `ssh` takes it."""
    python: str
    """The Python on the host that has parashard."""


def hosts_in(file: Path) -> list[NamedHost]:
    """Return the hosts of a host file: a line for each, `NAME` or `NAME python=PATH`; # begins a comment."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise ConfigurationError(f"host file {file}: {why}") from None
    found: dict[str, NamedHost] = {}
    for number, line in enumerate(lines, 1):
        name, *more = line.partition("#")[0].split() or [""]
        if not name:
            continue
        key, _, python = (more[0] if more else f"python={sys.executable}").partition("=")
        plain = f"{name}{python}".isprintable()
        if name.startswith("-") or len(more) > 1 or key != "python" or not python or name in found or not plain:
            raise ConfigurationError(
                f"host file {file}, line {number}: found {line.strip()!r}; allowed: NAME or NAME python=PATH, as `ssh "
                "NAME` takes it, and each host once"
            )
        if python.startswith("~"):
            raise ConfigurationError(
                f"host file {file}, line {number}: found python={python}, and ~ is not expanded; allowed: an absolute "
                "path, or one from the home folder there, such as python=venv/bin/python"
            )
        found[name] = NamedHost(name, python)
    if not 0 < len(found) <= HOSTS_MAX:
        raise ConfigurationError(f"host file {file}: names {len(found)} hosts; allowed: 1 to {HOSTS_MAX}")
    return list(found.values())
