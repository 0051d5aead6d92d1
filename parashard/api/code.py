"""Code of a run: what computed at its beginning, and what a user accepted later.

A run is identified by the first, whatever computes later. Both lie in `code.json` of its folder, by which its workers
and a resumption compare their own, file by file; a module that only one process imports does not count. The texts lie
beside it, in `code/`. Knows no script and no model. Called by the trainer, and by a worker's check of its call.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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


class Code(NamedTuple):
    """What computes, by SHA-256 (hex)."""

    name: str = ""  # the script's path below its root
    script: str = ""
    constants: str = ""  # of the model
    modules: Mapping[str, str] = MappingProxyType({})  # the user's own that are imported, by path
    text: str = ""  # of script and constants as earlier versions recorded it

    @property
    def sha256(self) -> str:
        """The digest of all of it."""
        modules = "".join(f"\n{name} {sha256}" for name, sha256 in sorted(self.modules.items()))
        return hashlib.sha256(f"{self.script}{self.constants}{modules}".encode()).hexdigest()

    def changed_in(self, other: Code) -> str:
        """Return what of both is another in the other one: a file's path, or the constants; "": nothing is."""
        if not (self.script or self.constants) and self.text:  # a record of an earlier version
            return "" if self.text == other.text else other.name or _CONSTANTS
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


def code_of_constants(constants: str) -> Code:
    """Return the code of a program that has no script."""
    return Code(constants=constants, text=hashlib.sha256(constants.encode()).hexdigest())


def code_of(run_dir: Path) -> RunCode | None:
    """Return the code of a run; None: it has no record of it."""
    try:
        found = json.loads((run_dir / CODE_FILE).read_text())
        if "codes" not in found:  # of an earlier version
            return RunCode(str(found["begun"]), Code(text=str(found["begun"])), Code(text=str(found["present"])))
        begun, present = (Code(**code) for code in found["codes"])
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
