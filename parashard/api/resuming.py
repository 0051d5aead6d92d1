"""Resumption of a script: the run that a call goes on with, or the answer of a call before that run.

A script that is resumed makes its calls again. Those before the run that it goes on with return what they returned
then, if they are the same calls; anything else is refused. Called by the trainer and the cluster of `parashard.api`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parashard.api.code import resumed_code
from parashard.api.fits import FitCall
from parashard.api.jobs import different_key
from parashard.api.script import raise_again
from parashard.errors import ConfigurationError
from parashard.job.load import job_of_run
from parashard.launch.programs import answers_in, program_of
from parashard.launch.run_folders import is_done, job_name_in, launcher_of, run_began_at, runs_here, runs_of
from parashard.process.run_files import JOB_FILE, short_path

GOES_ON = "goes_on"
"""In the answer of a call that was answered: the run that its script goes on with."""


class Resumed(NamedTuple):
    """What a call of a resumed script goes on with.

    Attributes
    ----------
    run_dir : Path
        The run that the script goes on with.
    answer : mapping
        What this call returned before that run began; empty: the run is this call's own.
    """

    run_dir: Path
    answer: Mapping[str, Any]


def unfinished(name: str, call: str) -> Path | None:
    """Return the newest run of this name and call, if it is not done."""
    runs = [run_dir for run_dir in runs_of(name) if _call_of(run_dir) in (call, None)]
    return runs[-1] if runs and not is_done(runs[-1]) else None


def resumed(
    name: str, script: Path | None, answers: Sequence[Mapping[str, Any]], asked: Path | None = None
) -> Resumed | None:
    """Return what a call of `fit` goes on with; None: it begins a run.

    Raises ConfigurationError if the run that was interrupted is left behind, since a fit before this one was made anew;
    or if the one that was asked for is done, or of another script.

    Parameters
    ----------
    script : Path, optional
        Where there is none, nobody counts calls: the newest run of this name counts.
    """
    if script is None:
        run_dir = asked or unfinished(name, "fit")
        return None if run_dir is None else Resumed(run_dir, {})
    number = len(answers)
    chosen = next((Path(answer[GOES_ON]) for answer in reversed(answers) if GOES_ON in answer), asked)
    if asked is not None and not _is_of(asked, script):
        raise ConfigurationError(f"{short_path(asked)} is a run of another script than {short_path(script)}")
    if chosen is None:
        chosen = _newest(name, script, answers)
        if chosen is None or is_done(chosen):
            return None
        made_here = [
            Path(answer["run_dir"]) for answer in answers if answer.get("call") == "fit" and "run_dir" in answer
        ]
        if made_here:
            # Another start of the script trains it, or has begun it since this one did.
            if launcher_of(chosen) is not None or run_began_at(chosen) > run_began_at(made_here[0]):
                return None
            raise ConfigurationError(
                f"{short_path(chosen)} is not done, and a fit before this one was made anew: give each fit of the "
                "script resume=True, so that those before it return what they returned; or none, to begin anew"
            )
    before = answers_in(chosen)
    if number > len(before):
        return None
    if number < len(before):
        if before[number].get("call") != "fit":
            raise ConfigurationError(
                f"call {number + 1} of the script is fit, and was {before[number].get('call')} when "
                f"{short_path(chosen)} began: change the script back, or begin a new run (resume=False)"
            )
        return Resumed(chosen, before[number])
    return Resumed(chosen, {})


def answered(earlier: Resumed, call: FitCall, *, accept_code_change: bool) -> dict[str, Any]:
    """Return what this call returned before the run that the script goes on with.

    Raises ConfigurationError if this is another call than that one was, or the folder of its run is gone.
    """
    answer, later = dict(earlier.answer), short_path(earlier.run_dir)
    if "error" in answer:
        raise_again(answer)
    answer = _moved(answer, earlier.run_dir.parent)
    run_dir = Path(answer["run_dir"])
    if not (run_dir / JOB_FILE).is_file() or not Path(answer["weights"]).is_file():
        raise ConfigurationError(
            f"{later} goes on from the weights of {short_path(run_dir)}, which are gone: bring that folder back, or "
            "begin a new run (resume=False)"
        )
    different = different_key(call.loaded, job_of_run(run_dir / JOB_FILE).job)
    if not different and answer.get("data", call.source.spec.fingerprint) != call.source.spec.fingerprint:
        different = f"the data are others ({call.source.spec.summary()} here)"
    if different:
        raise ConfigurationError(
            f"{later} goes on after {short_path(run_dir)}, but this call is not the one that made that run: "
            f"{different}; change it back, or begin a new run (resume=False)"
        )
    resumed_code(run_dir, call.code, accept_change=accept_code_change)
    return {**answer, GOES_ON: str(earlier.run_dir)}


def _newest(name: str, script: Path, answers: Sequence[Mapping[str, Any]]) -> Path | None:
    """Return the newest run that is of such a call, or of a later call of a script that has made it."""
    made_here = {str(answer.get("run_dir")) for answer in answers}
    for run_dir in reversed([path.absolute() for path in runs_here()]):
        if str(run_dir) in made_here or _call_of(run_dir) != "fit" or not _is_of(run_dir, script):
            continue
        before = answers_in(run_dir)
        if len(before) == len(answers):
            if job_name_in(run_dir) == name:
                return run_dir
        elif len(before) > len(answers):
            answer = before[len(answers)]
            named = answer.get("name") or job_name_in(Path(str(answer.get("run_dir", ""))))
            if named == name or "error" in answer:
                return run_dir
    return None


def _call_of(run_dir: Path) -> str | None:
    program = program_of(run_dir)
    return program.call if program is not None else None


def _is_of(run_dir: Path, script: Path) -> bool:
    """Return whether a run is of this script, whose folder may have been moved since."""
    program = program_of(run_dir)
    recorded = Path(program.script) if program is not None and program.script else None
    if recorded is None:
        return False
    return recorded == script or (recorded.name == script.name and (not recorded.exists() or recorded.samefile(script)))


def _moved(answer: dict[str, Any], runs: Path) -> dict[str, Any]:
    """Return an answer with its folder where it is now, if the folder of runs was moved as a whole."""
    was = Path(answer["run_dir"])
    weights = Path(answer.get("weights", was / "weights.safetensors"))
    now = runs / was.name
    if was.exists() or not now.exists():
        return {**answer, "weights": str(weights)}
    if weights.is_relative_to(was):
        weights = now / weights.relative_to(was)
    return {**answer, "run_dir": str(now), "weights": str(weights)}
