"""The code of a run: the texts that a process runs, digests of what they compute, and the record of both.

A text is read once, early, and kept, so that later edits of the file do not matter. Comments, docstrings, layout and
arguments that change no step do not count. A run is identified by the code at its beginning, whatever computes later.
Both codes lie in `code.json` of its folder, by which its workers and a resumption compare their own, file by file; a
module that only one process imports does not count. The texts lie beside it, in `code/`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from parashard.errors import ConfigurationError
from parashard.launch.run_folders import write_report
from parashard.process.durable import write_durably
from parashard.process.run_files import short_path

CODE_FILE = "code.json"
CODE_KEY = "accepted_code_sha256"
"""In the report of a run whose code was changed on the way."""
TEXTS = "code"
"""The folder of the texts that a run's workers are to run."""
KEPT_BYTES_MAX = 16 << 20
"""Of texts."""
_CONSTANTS = "a constant of the model"
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
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_NOT_OWN = _INSTALLED | {"parashard", "parashard_coordinator", "parashard_server", "parashard_worker"}
"""Folders of what is installed, and of this package."""


class Code(NamedTuple):
    """What computes, by SHA-256 (hex)."""

    name: str = ""  # the script's path below its root
    script: str = ""
    constants: str = ""  # of the model
    modules: Mapping[str, str] = MappingProxyType({})  # the user's own that are imported, by path

    @property
    def sha256(self) -> str:
        """The digest of all of it."""
        modules = "".join(f"\n{name} {sha256}" for name, sha256 in sorted(self.modules.items()))
        return hashlib.sha256(f"{self.script}{self.constants}{modules}".encode()).hexdigest()

    def changed_in(self, other: Code) -> str:
        """Return what of both is another in the other one: a file's path, or the constants; "": nothing is."""
        if self.script != other.script:
            return other.name or self.name
        shared = sorted(self.modules.keys() & other.modules.keys())
        module = next((name for name in shared if self.modules[name] != other.modules[name]), "")
        return module or (_CONSTANTS if self.constants != other.constants else "")


class RunCode(NamedTuple):
    """The code of a run at its beginning, whose digest identifies the run, and the code that computes now."""

    identity: str
    begun: Code
    present: Code

    @property
    def is_changed(self) -> bool:
        """Whether they differ."""
        return bool(self.begun.changed_in(self.present))


def code_of(run_dir: Path) -> RunCode | None:
    """Return the code of a run; None: it has no record of it."""
    try:
        found = json.loads((run_dir / CODE_FILE).read_text())
        begun, present = (Code(*(code[name] for name in Code._fields)) for code in found["codes"])
        return RunCode(str(found["begun"]), begun, present)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def resumed_code(run_dir: Path, mine: Code, *, accept_change: bool) -> RunCode:
    """Return the code of a run that goes on with this code, which it began with, accepted before, or accepts now."""
    code = code_of(run_dir)
    if code is None:
        return RunCode(mine.sha256, mine, mine)
    changed = code.present.changed_in(mine)
    if changed and code.begun.changed_in(mine) and not accept_change:
        raise ConfigurationError(
            f"{changed} was edited since {short_path(run_dir)} began{_kept(run_dir, changed)}; change it back, begin a "
            "new run (resume=False), or go on with it: accept_code_change=True"
        )
    known = {} if changed else code.present.modules
    return RunCode(code.identity, code.begun, mine._replace(modules={**known, **mine.modules}))


def check_same_code(run_dir: Path, mine: Code) -> None:
    """Refuse, in a worker, code other than that which computes the run now."""
    code = code_of(run_dir)
    changed = code.present.changed_in(mine) if code is not None else ""
    if changed == _CONSTANTS:
        raise ConfigurationError(
            "the model is another one in this worker than in the process that started it: a buffer of the module is "
            "drawn without a seed"
        )
    if changed:
        raise ConfigurationError(
            f"{changed} was edited since the run began, or this is another script; a worker is the script, run again: "
            f"put back the text that the run began with{_kept(run_dir, changed)}"
        )


def write_code(run_dir: Path, code: RunCode, texts: Mapping[str, bytes]) -> None:
    """Write a run's code, and its texts, to where its workers and a later resumption find them."""
    codes = [{**one._asdict(), "modules": dict(one.modules)} for one in (code.begun, code.present)]
    record = {"begun": code.identity, "present": code.present.sha256, "codes": codes}
    write_durably(run_dir / CODE_FILE, json.dumps(record).encode())
    room = KEPT_BYTES_MAX
    for name, text in texts.items():
        room -= len(text)
        if room < 0:
            break
        with suppress(OSError):  # a full disk: they are for people
            path = run_dir / TEXTS / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # the text may be one that others must not read
            path.write_bytes(text)


def note_code(run_dir: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Return a run's report with the code that was accepted, if there is one; the run's folder has it, too."""
    code = code_of(run_dir)
    if code is None or not code.is_changed:
        return report
    noted = {**report, CODE_KEY: code.present.sha256}
    with suppress(OSError):  # a full disk: what the call returns has it
        write_report(run_dir, noted)
    return noted


def _kept(run_dir: Path, name: str) -> str:
    """Return where the text of a file lies, in brackets; "" if it is not kept."""
    path = run_dir / TEXTS / name
    return f" (it is kept in {short_path(path)})" if path.is_file() else ""


# --- the texts ---


class Sources:
    """The texts of a script and of the user's modules below a folder: read once, early, as this process runs them."""

    def __init__(self, script: Path, text: bytes | None, root: Path) -> None:
        self._script, self._root = script, root
        self._name = script.name if root not in script.parents else script.relative_to(root).as_posix()
        self.texts = {self._name: script.read_bytes() if text is None else text}
        self._digests: dict[str, str] = {}

    def code(self, constants: str = "") -> Code:
        """Return the code of a program whose model has constants of this digest."""
        return Code(self._name, self._digest(self._name), constants, self.modules_sha256())

    def modules_sha256(self) -> dict[str, str]:
        """Return the SHA-256 (hex) of each of the user's own modules that is imported now, by its path."""
        for name, path in _own_modules(self._root, self._script):
            if name not in self.texts:
                try:
                    self.texts[name] = path.read_bytes()
                except OSError:  # it is gone: nobody else can import it either
                    continue
        return {name: self._digest(name) for name in sorted(self.texts) if name != self._name}

    def _digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = computed_sha256(self.texts[name])
        return self._digests[name]


def computed_sha256(text: bytes) -> str:
    """Return the SHA-256 (hex) of what a file computes, in any version of Python; of its text if it is not Python."""
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
    roots = [os.path.join(place, "") for place in {root, root.resolve()}]
    program = script.relative_to(root).parts[0] if root.name in _INSTALLED else ""  # `python -m` of what is installed
    for module in list(sys.modules.values()):
        try:
            file = object.__getattribute__(module, "__dict__").get("__file__")  # of a lazy module, without its import
        except AttributeError:
            continue
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        below = next((place for place in roots if file.startswith(place)), None)
        if below is None or (path := Path(file)) in (script, script.resolve()):
            continue
        name = path.relative_to(below)
        if program and name.parts[0] != program:
            continue
        if not _NOT_OWN & set(name.parts) and not any(folder in path.parents for folder in installed):
            yield name.as_posix(), path
