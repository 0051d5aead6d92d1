"""The commands `parashard run` and `parashard resume`: train a job."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from parashard.cli.main import complain
from parashard.cli.options import (
    Consistency,
    DeviceName,
    JobFile,
    On,
    ReportJson,
    RunDir,
    Sets,
    Shards,
    TlsDir,
    Trace,
    Workers,
    begin_run,
    complete_runs,
    job_flags,
    loaded_job,
)
from parashard.display.live import console_for, open_view
from parashard.display.status_tables import not_learned, print_summary
from parashard.errors import ConfigurationError
from parashard.job.digest import NAMED_MAX
from parashard.job.keys import shown
from parashard.job.layers import Override
from parashard.job.load import PLACING, LoadedJob, describe
from parashard.launch.programs import ResumeFlags, program_of, start_again
from parashard.launch.run import INTERRUPTED, Outcome, run_job
from parashard.launch.run_folders import locked_run, new_run_dir, resumed_job, resumed_run_dir, unfinished_run
from parashard.launch.runs import Run, job_credentials
from parashard.process.best_effort import why_failed
from parashard.process.run_files import short_path
from parashard.process.shell import ExitCode

Output = Annotated[Path | None, typer.Option(help="Where to copy the final weights.")]
FromCheckpoint = Annotated[
    str, typer.Option(metavar="jN", help="With other --shards than before: start from this drained checkpoint.")
]


def run(
    job: JobFile,
    shards: Shards = None,
    workers: Workers = None,
    consistency: Consistency = None,
    device: DeviceName = None,
    on: On = None,
    set_: Sets = None,
    run_dir: RunDir = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was stopped: --run-dir, or this job's newest one.")
    ] = False,
    from_checkpoint: FromCheckpoint = "",
    init: Annotated[Path | None, typer.Option(help="safetensors file to start from.")] = None,
    output: Output = None,
    tls_dir: TlsDir = None,
    trace: Trace = False,
    json_: ReportJson = False,
) -> None:
    """Train a job, on this machine or on others, and show how it goes."""
    flags = job_flags(shards, workers, consistency, device, set_, on)
    loaded = loaded_job(job, flags, begun=resume)
    if resume and init is not None:
        raise ConfigurationError("--init with --resume: a run that goes on has its weights; allowed: one of the two")
    if from_checkpoint and not resume:
        raise ConfigurationError("--from-checkpoint needs --resume: it names a checkpoint of a run that goes on")
    name, console, credentials = loaded.job.job.name, _console(json_), job_credentials(tls_dir)
    if resume:
        folder, named = resumed_run_dir(run_dir, name), loaded
        loaded = resumed_job(folder, flags)._replace(path=named.path)
        for line in not_taken(named, loaded, folder):
            console.print(Text(line), soft_wrap=True)
    else:
        keep = run_dir is not None and os.path.exists(run_dir)  # False of a name that is too long
        folder = new_run_dir(run_dir, name)

    begins = Run(
        loaded,
        folder,
        credentials=credentials,
        resume=resume,
        from_checkpoint=from_checkpoint,
        init=init,
        output=output,
        trace=trace,
    )
    if resume:
        outcome = _gone_on(begins, console, json_=json_)
    else:
        view = open_view(console, only_terminal=json_)
        outcome = begin_run(folder, view, lambda: run_job(begins, view), keep=keep)
    _tell_end(outcome, name, console, json_)


def resume(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run directory, or its name under runs/; default: the newest unfinished one.",
            autocompletion=complete_runs,
        ),
    ] = None,
    shards: Shards = None,
    workers: Workers = None,
    device: DeviceName = None,
    on: On = None,
    set_: Sets = None,
    from_checkpoint: FromCheckpoint = "",
    output: Output = None,
    tls_dir: TlsDir = None,
    trace: Trace = False,
    json_: ReportJson = False,
) -> None:
    """Go on with a run that was stopped, with the values that it began with and the flags of now over them."""
    folder, console = unfinished_run(run), _console(json_)
    flags = job_flags(shards, workers, None, device, set_, on)
    program = program_of(folder)
    if program is not None:
        unknown = {"--output": output, "--tls-dir": tls_dir, "--trace": trace, "--json": json_}
        start_again(folder, program, _flags_of_a_script(flags, from_checkpoint, unknown))
    loaded = resumed_job(folder, flags)
    goes_on = Run(
        loaded,
        folder,
        credentials=job_credentials(tls_dir),
        resume=True,
        from_checkpoint=from_checkpoint,
        output=output,
        trace=trace,
    )
    outcome = _gone_on(goes_on, console, json_=json_)
    _tell_end(outcome, loaded.job.job.name, console, json_)


def _flags_of_a_script(flags: Sequence[Override], from_checkpoint: str, unknown: Mapping[str, object]) -> ResumeFlags:
    """Return the flags of a script's run; refuse those that only the script can set."""
    given = [flag for flag, value in unknown.items() if value]
    given += [f"{flag} {key}" for key, _, flag in flags if key.partition(".")[0] not in PLACING]
    if given:
        raise ConfigurationError(f"{', '.join(given)}: of a script's run, the script says this")
    return ResumeFlags(flags, from_checkpoint)


def _gone_on(run: Run, console: Console, *, json_: bool) -> Outcome:
    """Resume a run, and run it to its end."""
    with closing(open_view(console, only_terminal=json_)) as view, locked_run(run.folder):
        return run_job(run, view)


def _console(json_: bool) -> Console:
    """Return the console for a run's progress: with `--json` standard output is for the report alone."""
    return console_for(sys.stderr if json_ else sys.stdout)


def _tell_end(outcome: Outcome, job: str, console: Console, json_: bool) -> NoReturn:
    """Print how a run ended, and exit as it did."""
    interrupted = outcome.exit_code == INTERRUPTED
    if outcome.report and not json_ and (interrupted or outcome.exit_code == ExitCode.DONE):
        print_summary(outcome.report, outcome.run_dir, console, outcome.copy)
    if outcome.exit_code != ExitCode.DONE:
        logs = "" if outcome.is_refused or interrupted else f"; logs are in {short_path(outcome.run_dir / 'logs')}"
        complain(f"{outcome.reason}{logs}")
    if json_:
        if outcome.report and not_learned(outcome.report):
            complain(not_learned(outcome.report))
        is_there = not outcome.is_refused and outcome.run_dir.is_dir()
        where = {"run_dir": str(outcome.run_dir)} if is_there else {}
        try:
            typer.echo(json.dumps(outcome.report or {"job": job, "state": "failed", "weights": None, **where}))
        except OSError as error:
            complain(f"the report cannot be printed: {why_failed(error)}; see {short_path(outcome.run_dir)}")
            raise typer.Exit(outcome.exit_code or int(ExitCode.FAILED)) from None
    raise typer.Exit(outcome.exit_code)


def not_taken(named: LoadedJob, resumed: LoadedJob, run_dir: Path) -> list[str]:
    """Return a message that names the values of the given job file which a resumed run does not take."""
    theirs = {key: value for key, value, _ in describe(resumed)}
    others = [
        f"{key} = {shown(value)} (the run: {shown(theirs.get(key))})"
        for key, value, _ in describe(named)
        if value != theirs.get(key)
    ]
    if not others:
        return []
    more = f", and {len(others) - NAMED_MAX} more" if len(others) > NAMED_MAX else ""
    return [
        f"{short_path(run_dir)} goes on with its own values; not taken from {short_path(named.path)}: "
        f"{', '.join(others[:NAMED_MAX])}{more}"
    ]
