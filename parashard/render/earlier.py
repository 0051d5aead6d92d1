"""Stale files of an earlier rendering in a folder, which the job's present manifests do not include.

Removes nothing. Called by `parashard.cli.render`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from parashard.render.kubernetes import FOLDERS, SECRETS_PATH
from parashard.render.templates import template, templates


def earlier_files(folder: Path, files: Collection[str]) -> list[str]:
    """Return the files in a folder that an earlier rendering wrote and the present one does not.

    A file counts only if its path is a template's and it begins as that template does, so another program's
    ``secrets.sh`` does not.

    Parameters
    ----------
    folder : Path
        Destination of the manifests.
    files : collection of str
        Paths below it of the present manifests.
    """
    possible = {SECRETS_PATH, *(path for part in FOLDERS for path in templates(part))}
    return sorted(path for path in possible.difference(files) if _is_rendered(folder / path, template(path)))


def _is_rendered(path: Path, text: str) -> bool:
    beginning = text.partition("@{")[0].encode()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(beginning)) == beginning
