"""The code of a run: the source texts that a process runs, their digests, and the record of both.

A text is read once, early, and kept, so that later edits of the file have no effect. Digests ignore comments,
docstrings, layout and arguments that change no step. A run is identified by its initial code, whatever code computes
later. `code.json` in the run's folder has the initial and the current code; workers and a resumption compare their own
with it, file by file, ignoring modules that only one process imports. The texts are beside it, in `code/`.
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
"""Key in the report of a run that continued with changed code."""
TEXTS = "code"
"""Folder of the texts that a run's workers must run."""
KEPT_BYTES_MAX = 16 << 20
"""Most bytes of texts that are kept."""
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
"""Their arguments are not hashed: those that change a step are compared in the run's job."""
_NO_CODE = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_NOT_OWN = _INSTALLED | {"parashard", "parashard_coordinator", "parashard_server", "parashard_worker"}
"""Folders of installed packages and of this project."""


class Code(NamedTuple):
    """The code of a script, its modules and its model's constants, as SHA-256 (hex)."""

    name: str = ""  # the script's path below its root
    script: str = ""
    constants: str = ""  # of the model
    modules: Mapping[str, str] = MappingProxyType({})  # the user's imported modules, by path

    @property
    def sha256(self) -> str:
        """The digest of script, constants and modules."""
        modules = "".join(f"\n{name} {sha256}" for name, sha256 in sorted(self.modules.items()))
        return hashlib.sha256(f"{self.script}{self.constants}{modules}".encode()).hexdigest()

    def changed_in(self, other: Code) -> str:
        """Return the first difference to the other code, a file's path or the constants; "" if there is none."""
        if self.script != other.script:
            return other.name or self.name
        shared = sorted(self.modules.keys() & other.modules.keys())
        module = next((name for name in shared if self.modules[name] != other.modules[name]), "")
        return module or (_CONSTANTS if self.constants != other.constants else "")


class RunCode(NamedTuple):
    """The initial code of a run, whose digest identifies the run, and the code that computes now."""

    identity: str
    begun: Code
    present: Code

    @property
    def is_changed(self) -> bool:
        """Whether the current code differs from the initial one."""
        return bool(self.begun.changed_in(self.present))


def code_of(run_dir: Path) -> RunCode | None:
    """Return the recorded code of a run; None if there is no readable record."""
    try:
        found = json.loads((run_dir / CODE_FILE).read_text())
        begun, present = (Code(*(code[name] for name in Code._fields)) for code in found["codes"])
        return RunCode(str(found["begun"]), begun, present)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def resumed_code(run_dir: Path, mine: Code, *, accept_change: bool) -> RunCode:
    """Return the code of a run resumed with `mine`; refuse a change that was not accepted before or now."""
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
    """Refuse, in a worker, code that differs from the run's current code."""
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
    """Write a run's code and texts to its folder, for its workers and a later resumption."""
    codes = [{**one._asdict(), "modules": dict(one.modules)} for one in (code.begun, code.present)]
    record = {"begun": code.identity, "present": code.present.sha256, "codes": codes}
    write_durably(run_dir / CODE_FILE, json.dumps(record).encode())
    room = KEPT_BYTES_MAX
    for name, text in texts.items():
        room -= len(text)
        if room < 0:
            break
        with suppress(OSError):  # a full disk: texts are only for people
            path = run_dir / TEXTS / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # other users may not be allowed to read the text
            path.write_bytes(text)


def note_code(run_dir: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Return a run's report with the digest of changed code, if any; also write it to the run's folder."""
    code = code_of(run_dir)
    if code is None or not code.is_changed:
        return report
    noted = {**report, CODE_KEY: code.present.sha256}
    with suppress(OSError):  # a full disk: the returned report still has the digest
        write_report(run_dir, noted)
    return noted


def _kept(run_dir: Path, name: str) -> str:
    """Return the path of a file's kept text, in brackets; "" if it is not kept."""
    path = run_dir / TEXTS / name
    return f" (it is kept in {short_path(path)})" if path.is_file() else ""


# --- the texts ---


class Sources:
    """Texts of a script and of the user's modules below a folder: read once, early, as this process runs them."""

    def __init__(self, script: Path, text: bytes | None, root: Path) -> None:
        self._script, self._root = script, root
        self._name = script.name if root not in script.parents else script.relative_to(root).as_posix()
        self.texts = {self._name: script.read_bytes() if text is None else text}
        self._digests: dict[str, str] = {}

    def code(self, constants: str = "") -> Code:
        """Return the code of this program; `constants` is the digest of its model's constants."""
        return Code(self._name, self._digest(self._name), constants, self.modules_sha256())

    def modules_sha256(self) -> dict[str, str]:
        """Return the SHA-256 (hex) of each of the user's modules imported so far, by path."""
        for name, path in _own_modules(self._root, self._script):
            if name not in self.texts:
                try:
                    self.texts[name] = path.read_bytes()
                except OSError:  # the file is gone, so no other process can import it
                    continue
        return {name: self._digest(name) for name in sorted(self.texts) if name != self._name}

    def _digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = computed_sha256(self.texts[name])
        return self._digests[name]


def computed_sha256(text: bytes) -> str:
    """Return the SHA-256 (hex) of a file's syntax tree, equal in all Python versions; of its text if not Python."""
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
            if name not in _NO_CODE and field is not None and field != []:  # Python versions differ in empty fields
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
    """Return a field of a node without constant statements (docstrings) and arguments that change no step."""
    if isinstance(node, ast.Call) and name in ("args", "keywords"):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in STRATEGIES:
            return []
        if called == "fit" and name == "keywords":
            return [keyword for keyword in field if keyword.arg not in FIT_ARGUMENTS]
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty strings
        return [item for item in field if not (isinstance(item, ast.Constant) and item.value == "")]
    if isinstance(field, list):
        return [item for item in field if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))]
    return field


def _own_modules(root: Path, script: Path) -> Iterator[tuple[str, Path]]:
    """Yield the modules below a folder that are imported now, by path, except installed packages."""
    installed = [folder for folder in (Path(sys.prefix), Path(sys.base_prefix)) if root in folder.parents]
    roots = [os.path.join(place, "") for place in {root, root.resolve()}]
    program = script.relative_to(root).parts[0] if root.name in _INSTALLED else ""  # `python -m` of an installed one
    for module in list(sys.modules.values()):
        try:
            file = object.__getattribute__(module, "__dict__").get("__file__")  # does not import a lazy module
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
