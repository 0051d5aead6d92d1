"""Code of a run: the digest of the code at its beginning, and of the code that a user accepted later.

A run is identified by the first, whatever computes later. The second lies beside it, in `code.json`: a run's workers
compare theirs with it. Knows no script and no model. Called by the trainer, and by a worker's check of its call.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from parashard.errors import ConfigurationError
from parashard.launch.run_folders import write_report
from parashard.store.durable import write_durably

CODE_FILE = "code.json"
CODE_KEY = "accepted_code_sha256"
"""In the report of a run whose code was changed on the way."""


class Code(NamedTuple):
    """SHA-256 (hex) of the code at a run's beginning, and of the code that computes now."""

    begun: str
    present: str

    @property
    def is_changed(self) -> bool:
        """Whether they differ."""
        return self.begun != self.present


def code_of(run_dir: Path) -> Code | None:
    """Return the code of a run; None: it has no record of it."""
    try:
        found = json.loads((run_dir / CODE_FILE).read_text())
        return Code(str(found["begun"]), str(found["present"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def resumed_code(run_dir: Path, present: str, *, accept_change: bool) -> Code:
    """Return the code of a run that goes on with the present one.

    Raises
    ------
    ConfigurationError
        If it is neither what the run was begun with nor what was accepted before, and is not accepted now.
    """
    code = code_of(run_dir)
    if code is None:
        return Code(present, present)
    if present not in code and not accept_change:
        raise ConfigurationError(
            f"the code of the model is not that of the run in {run_dir}: the script was edited; change it back, begin "
            "a new run (resume=False), or go on with it: accept_code_change=True"
        )
    return Code(code.begun, present)


def write_code(run_dir: Path, code: Code) -> None:
    """Write a run's code to where its workers and a later resumption find it."""
    write_durably(run_dir / CODE_FILE, json.dumps(code._asdict()).encode())


def note_code(run_dir: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Return a run's report with the code that was accepted, if there is one; the run's folder has it, too."""
    code = code_of(run_dir)
    if code is None or not code.is_changed:
        return report
    noted = {**report, CODE_KEY: code.present}
    with suppress(OSError):  # a full disk: what the call returns has it
        write_report(run_dir, noted)
    return noted
