"""What an earlier rendering left in a folder: files that it wrote, and that the job's manifests have no more.

Looks, and removes nothing. Called by `parashard.cli.render`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from parashard.render.kubernetes import FOLDERS, SECRETS_PATH
from parashard.render.templates import template, templates


def earlier_files(folder: Path, files: Collection[str]) -> list[str]:
    """Return which files in a folder an earlier call's manifests left there, and these do not have.

    A file is one of those only if its path is a template's and it begins as that template does: another's
    ``secrets.sh`` is none.

    Parameters
    ----------
    folder : Path
        Where manifests are written to.
    files : collection of str
        Paths below it of the manifests that are written now.
    """
    possible = {SECRETS_PATH, *(path for part in FOLDERS for path in templates(part))}
    return sorted(path for path in possible.difference(files) if _is_rendered(folder / path, template(path)))


def _is_rendered(path: Path, text: str) -> bool:
    beginning = text.partition("@{")[0].encode()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(beginning)) == beginning
