"""Sources: the texts of a script and of its user's own modules, as this process runs them, and what they compute.

A text is read once, early, and kept: what is edited later is not what this process runs. Comments, docstrings, layout
and arguments that change no step do not count. Knows no model and no run.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIT_ARGUMENTS = frozenset({"resume", "verbose", "accept_code_change"})
"""Arguments of `fit` that change no step."""
STRATEGIES = frozenset(
    {
        "CentralStorageStrategy",
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "OneDeviceStrategy",
        "ParameterServerStrategy",
        "TPUStrategy",
    }
)
"""Their arguments are compared with the run's job, as far as they change a step."""
_NO_CODE = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_NOT_OWN = frozenset(
    {"site-packages", "dist-packages", "parashard", "parashard_coordinator", "parashard_server", "parashard_worker"}
)
"""Folders of what is installed, and of this package."""


class Sources:
    """The texts of a program.

    Parameters
    ----------
    text : bytes, optional
        Its text, if it was read earlier.
    root : Path
        The folder whose modules are the user's own: the script's, or the one that `python -m` was started in.
    """

    def __init__(self, script: Path, text: bytes | None, root: Path) -> None:
        self._script, self._root = script, root
        self._name = script.name if root not in script.parents else script.relative_to(root).as_posix()
        self._texts = {self._name: script.read_bytes() if text is None else text}
        self._digests: dict[str, str] = {}

    @property
    def script_name(self) -> str:
        """The script's path below the root."""
        return self._name

    def text_sha256(self) -> str:
        """Return the SHA-256 (hex) of the script's text."""
        return hashlib.sha256(self._texts[self._name]).hexdigest()

    def script_sha256(self) -> str:
        """Return the SHA-256 (hex) of what the script computes."""
        return self._digest(self._name)

    def modules_sha256(self) -> dict[str, str]:
        """Return the SHA-256 (hex) of each of the user's own modules that is imported now, by its path."""
        for name, path in _own_modules(self._root, self._script):
            if name not in self._texts:
                try:
                    self._texts[name] = path.read_bytes()
                except OSError:  # it is gone: nobody else can import it either
                    continue
        return {name: self._digest(name) for name in sorted(self._texts) if name != self._name}

    def texts(self) -> dict[str, bytes]:
        """Return the texts so far, by path."""
        return dict(self._texts)

    def _digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = computed_sha256(self._texts[name])
        return self._digests[name]


def computed_sha256(text: bytes) -> str:
    """Return the SHA-256 (hex) of what a file of Python computes; of its whole text if it is no Python.

    It is the same in every version of Python that reads the file.
    """
    digest = hashlib.sha256()
    try:
        for piece in _pieces(ast.parse(text)):
            digest.update(piece.encode())
    except (SyntaxError, ValueError, RecursionError):
        return hashlib.sha256(text).hexdigest()
    return digest.hexdigest()


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for name, whole in ast.iter_fields(value):
            field = _counted(value, name, whole)
            if name not in _NO_CODE and field is not None and field != []:  # empty fields depend on the version
                yield f" {name}="
                yield from _pieces(field)
        yield ")"
    elif isinstance(value, list):
        yield "["
        for item in value:
            yield from _pieces(item)
        yield "]"
    else:
        yield f"{type(value).__name__}:{value!r};"


def _counted(node: ast.AST, name: str, field: Any) -> Any:
    """Return a field of a node without statements that are only a text, and without arguments that change no step."""
    if isinstance(node, ast.Call) and name in ("args", "keywords"):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in STRATEGIES:
            return []
        if called == "fit" and name == "keywords":
            return [keyword for keyword in field if keyword.arg not in FIT_ARGUMENTS]
    if isinstance(node, ast.JoinedStr):  # Python 3.12 has empty texts there
        return [item for item in field if not (isinstance(item, ast.Constant) and item.value == "")]
    if isinstance(field, list):
        return [item for item in field if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))]
    return field


def _own_modules(root: Path, script: Path) -> Iterator[tuple[str, Path]]:
    """Return the modules below a folder that are imported now, by path; not those that are installed there."""
    installed = [folder for folder in (Path(sys.prefix), Path(sys.base_prefix)) if root in folder.parents]
    roots = {root, root.resolve()}
    for module in list(sys.modules.values()):
        try:
            file = object.__getattribute__(module, "__dict__").get("__file__")  # of a lazy module, without its import
        except AttributeError:
            continue
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file)
        below = next((place for place in roots if place in path.parents), None)
        if below is None or path in (script, script.resolve()):
            continue
        name = path.relative_to(below)
        if not _NOT_OWN & set(name.parts) and not any(folder in path.parents for folder in installed):
            yield name.as_posix(), path
