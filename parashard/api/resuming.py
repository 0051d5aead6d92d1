"""Runs that a program goes on with: its newest one that is not done, and what its calls returned before that.

Called by the trainer and the cluster of `parashard.api`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from parashard.api.script import answers_in
from parashard.display.paths import short_path
from parashard.errors import ConfigurationError
from parashard.launch.run_folders import is_done, resumed_run_dir, runs_of


def unfinished(name: str, calls_before: int | None = None) -> Path | None:
    """Return the newest run of a program, if it is not done and of the call with so many before it; None: of any."""
    try:
        run_dir = resumed_run_dir(None, name)
    except ConfigurationError:
        return None
    if is_done(run_dir):
        return None
    return run_dir if calls_before in (None, len(answers_in(run_dir))) else None


def check_followed(name: str, calls_before: int, made_here: Collection[Path]) -> None:
    """Refuse to resume a call whose run is left behind: what came before it was made anew in this process.

    Raises
    ------
    ConfigurationError
        If the newest run but those of this process is not done, and is of the call with so many before it.
    """
    runs = runs_of(name)
    others = [run_dir for run_dir in runs if run_dir not in made_here]
    if len(others) == len(runs) or not others or is_done(others[-1]):
        return
    if len(answers_in(others[-1])) == calls_before:
        raise ConfigurationError(
            f"{short_path(others[-1])} is not done, and a fit before this one was made anew: give each fit of the "
            "script resume=True, so that those before it return what they returned; or none, to begin anew"
        )


def answered(name: str, calls_before: int) -> dict[str, Any]:
    """Return what a fit returned before the newest run of its script, which is not done; empty: nothing is known."""
    run_dir = unfinished(name)
    answers = answers_in(run_dir) if run_dir is not None else []
    answer = answers[calls_before] if calls_before < len(answers) else {}
    return answer if answer.get("call") == "fit" and "error" not in answer else {}
