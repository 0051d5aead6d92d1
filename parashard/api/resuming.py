"""Runs that a program goes on with: its newest one that is not done, and what its calls returned before that.

Called by the trainer and the cluster of `parashard.api`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parashard.api.script import answers_in
from parashard.errors import ConfigurationError
from parashard.launch.run_folders import is_done, resumed_run_dir


def unfinished(name: str, calls_before: int | None = None) -> Path | None:
    """Return the newest run of a program, if it is not done and of the call with so many before it; None: of any."""
    try:
        run_dir = resumed_run_dir(None, name)
    except ConfigurationError:
        return None
    if is_done(run_dir):
        return None
    return run_dir if calls_before in (None, len(answers_in(run_dir))) else None


def answered(name: str, calls_before: int) -> dict[str, Any]:
    """Return what a fit returned before the newest run of its script, which is not done; empty: nothing is known."""
    run_dir = unfinished(name)
    answers = answers_in(run_dir) if run_dir is not None else []
    answer = answers[calls_before] if calls_before < len(answers) else {}
    return answer if answer.get("call") == "fit" and "error" not in answer else {}
