"""The command line: `parashard run`, `resume`, `config`, `status`, `scale`, `worker`; others have files of their own.

Parses, calls, prints; decides nothing. Errors go to standard error in one line, never a traceback of a user's mistake.
Exit codes: 0 done, 1 failed, 2 configuration, 3 fenced, 75 retry later, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parashard import __version__
from parashard.cli.certs import certs
from parashard.cli.chaos import chaos
from parashard.cli.checkpoint import checkpoint
from parashard.cli.health import health
from parashard.cli.options import App, Sets, TlsDir, Trace, begin_run, complete_runs, told_how_to_continue, told_job
from parashard.cli.render import render_app
from parashard.cli.runs import kill, runs
from parashard.display.figures import counted
from parashard.display.live import JobView, NoView, console_for, open_view
from parashard.display.screen import StatusScreen
from parashard.display.summary import summary_lines
from parashard.errors import ConfigurationError, ParashardError, Unreachable, WrongRun
from parashard.job.differences import NAMED_MAX
from parashard.job.keys import shown
from parashard.job.layers import Override, parse_set
from parashard.job.load import LoadedJob, describe
from parashard.launch.local_cluster import MODULES
from parashard.launch.run import INTERRUPTED, Outcome, run_job
from parashard.launch.run_folders import (
    check_in_progress,
    new_run_dir,
    place_of,
    read_report,
    resumed_job,
    resumed_run_dir,
    unfinished_run,
)
from parashard.launch.stopping import resume_command, short_path
from parashard.process.arguments import credentials_in
from parashard.process.shell import ExitCode, LogFormat, exit_code_of
from parashard.process.side_effects import lossy, release_standard_streams, why_failed
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator, run_id_in

app = App(help="A parameter server for training on machines that come and go.", pretty_exceptions_enable=False)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")]
Shards = Annotated[int | None, typer.Option(help="Number of shards (cluster.shards).")]
Workers = Annotated[int | None, typer.Option(help="Number of workers (cluster.workers).")]
Consistency = Annotated[str | None, typer.Option(help="async, ssp:K or sync:N (consistency.policy).")]
DeviceName = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N (cluster.device).")]
Output = Annotated[Path | None, typer.Option(help="Where to copy the final weights.")]
FromCheckpoint = Annotated[
    str, typer.Option(metavar="jN", help="With other --shards than before: start from this drained checkpoint.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as one JSON line.")]
Where = Annotated[
    str | None,
    typer.Argument(
        metavar="ADDR|RUN",
        help="The coordinator: host:port, a run directory or a name under runs/; default: the newest run.",
        autocompletion=complete_runs,
    ),
]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"parashard {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def parashard(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """A parameter server for training on machines that come and go."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.CONFIGURATION)


@app.command()
def run(
    job: JobFile,
    shards: Shards = None,
    workers: Workers = None,
    consistency: Consistency = None,
    device: DeviceName = None,
    set_: Sets = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run's own directory; must be empty or new.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was stopped: --run-dir, or this job's newest one.")
    ] = False,
    from_checkpoint: FromCheckpoint = "",
    init: Annotated[Path | None, typer.Option(help="safetensors file to start from.")] = None,
    output: Output = None,
    tls_dir: TlsDir = None,
    trace: Trace = False,
    json_: Json = False,
) -> None:
    """Train a job on a local cluster, and show how it goes."""
    flags = _flags(shards, workers, consistency, device, set_)
    loaded = told_job(job, flags)
    if resume and init is not None:
        raise ConfigurationError("--init with --resume: a run that goes on has its weights; allowed: one of the two")
    if from_checkpoint and not resume:
        raise ConfigurationError("--from-checkpoint needs --resume: it names a checkpoint of a run that goes on")
    name, console = loaded.job.job.name, _console(json_)
    if resume:
        folder, named = resumed_run_dir(run_dir, name), loaded
        loaded = replace(resumed_job(folder, flags), path=named.path)
        for line in not_taken(named, loaded, folder):
            console.print(Text(line), soft_wrap=True)
    else:
        keep = run_dir is not None and run_dir.exists()
        folder = new_run_dir(run_dir, name)

    view = _view(console, json_)

    def train() -> Outcome:
        return run_job(
            loaded,
            folder,
            view,
            init=init,
            output=output,
            resume=resume,
            from_checkpoint=from_checkpoint,
            tls_dir=tls_dir,
            trace=trace,
        )

    if resume:
        with closing(view):
            outcome = train()
    else:
        outcome = begin_run(folder, view, train, keep=keep)
    _tell_end(outcome, name, console, json_)


@app.command()
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
    set_: Sets = None,
    from_checkpoint: FromCheckpoint = "",
    output: Output = None,
    tls_dir: TlsDir = None,
    trace: Trace = False,
    json_: Json = False,
) -> None:
    """Go on with a run that was stopped, with the values that it began with and the flags of now over them."""
    folder, console = unfinished_run(run), _console(json_)
    loaded = resumed_job(folder, _flags(shards, workers, None, device, set_))
    with closing(_view(console, json_)) as view:
        outcome = run_job(
            loaded,
            folder,
            view,
            init=None,
            output=output,
            resume=True,
            from_checkpoint=from_checkpoint,
            tls_dir=tls_dir,
            trace=trace,
        )
    _tell_end(outcome, loaded.job.job.name, console, json_)


@app.command()
def config(
    job: JobFile,
    shards: Shards = None,
    workers: Workers = None,
    consistency: Consistency = None,
    device: DeviceName = None,
    set_: Sets = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every value of a job and where it came from."""
    rows = describe(told_job(job, _flags(shards, workers, consistency, device, set_)))
    if json_:
        typer.echo(json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, default=str))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("key", "value", "origin"):
        table.add_column(name, overflow="fold")
    for key, value, origin in rows:
        shown = "" if value is None else json.dumps(value, default=str)
        table.add_row(Text(key), Text(shown), Text(origin, style="dim" if origin == "default" else ""))
    Console().print(table)


@app.command()
def status(
    where: Where = None,
    tls_dir: TlsDir = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a running coordinator how its job goes."""
    place = place_of(where)
    try:
        with told_how_to_continue(place):
            reply = _coordinator(place, tls_dir).get_status(run_id_in(place))
    except (Unreachable, WrongRun):
        report = read_report(Path(place))
        if not report:
            raise
        # The run is over and its coordinator gone: the report says how it went.
        if json_:
            typer.echo(json.dumps(report))
        else:
            _print_summary(report, Path(place).absolute(), Console())
            if report["state"] != "done":
                typer.echo(f"Continue: {resume_command(Path(place).absolute())}")
        return
    if json_:
        typer.echo(
            json.dumps(
                MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            )
        )
    else:
        Console().print(StatusScreen(reply, fits_height=False))


@app.command()
def scale(
    workers: Annotated[int, typer.Option(min=0, max=4096, help="Workers to keep alive, 0 to 4096.")],
    where: Where = None,
    tls_dir: TlsDir = None,
) -> None:
    """Change the number of workers of a running job, on a local cluster or on Kubernetes."""
    place = place_of(where)
    check_in_progress(place)
    with told_how_to_continue(place):
        reply = _coordinator(place, tls_dir).scale(workers, run_id_in(place))
    typer.echo(f"{counted(reply.workers_wanted, 'worker')} wanted")
    if not reply.workers_wanted:
        typer.echo(f"the job waits until one joins: parashard worker --connect {place}")


@app.command()
def worker(
    connect: Annotated[
        str,
        typer.Option(
            metavar="ADDR|RUN",
            help="The coordinator: host:port, a run directory or a name under runs/.",
            autocompletion=complete_runs,
        ),
    ],
    device: DeviceName = None,
    name: Annotated[str, typer.Option(help="Its name in the job; default: the next free one.")] = "",
    set_: Sets = None,
    model_folder: Annotated[Path | None, typer.Option(help="Where a model of your own lies on this machine.")] = None,
    tls_dir: TlsDir = None,
    trace: Trace = False,
    log_format: Annotated[
        LogFormat, typer.Option(help="text for people; logfmt or json: a line of fields for each event.")
    ] = LogFormat.TEXT,
) -> None:
    """Join a running job with one more worker, from anywhere."""
    arguments = ["--connect", place_of(connect), "--name", name, "--device", device or "", "--log-format", log_format]
    arguments += [part for text in set_ or () for part in ("--set", text)]
    if model_folder is not None:
        arguments += ["--model-folder", str(model_folder.absolute())]
    if tls_dir is not None:
        arguments += ["--tls-dir", str(tls_dir.absolute())]
    arguments += ["--trace"] if trace else []
    os.execv(sys.executable, [sys.executable, "-P", "-m", MODULES["worker"], *arguments])


@app.command(hidden=True)
def version() -> None:
    """Print the version."""
    typer.echo(f"parashard {__version__}")


app.command()(kill)
app.add_typer(runs, name="runs")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(render_app, name="render")
app.add_typer(certs, name="certs")
app.command()(chaos)
app.command()(health)


def main() -> None:
    """Run the command line; errors of ours become one line and an exit code."""
    try:
        app(prog_name="parashard")
    except ParashardError as error:
        _complain(str(error))
        sys.exit(int(exit_code_of(error)))
    finally:
        release_standard_streams()


def _flags(
    shards: int | None,
    workers: int | None,
    consistency: str | None,
    device: str | None,
    sets: Sequence[str] | None,
) -> list[Override]:
    flags: list[Override] = [parse_set(text) for text in sets or ()]
    for key, value, flag in (
        ("cluster.shards", shards, "--shards"),
        ("cluster.workers", workers, "--workers"),
        ("consistency.policy", consistency, "--consistency"),
        ("cluster.device", device, "--device"),
    ):
        if value is not None:
            flags.append((key, value, flag))
    return flags


def _view(console: Console, json_: bool) -> JobView:
    return open_view(console) if not json_ or console.is_terminal else NoView()


def _console(json_: bool) -> Console:
    """Return where a run's progress is shown: standard output is for the report alone with `--json`."""
    return console_for(sys.stderr if json_ else sys.stdout)


def _tell_end(outcome: Outcome, job: str, console: Console, json_: bool) -> NoReturn:
    """Print how a run ended, and exit as it did."""
    interrupted = outcome.exit_code == INTERRUPTED
    if outcome.report and not json_ and (interrupted or outcome.exit_code == ExitCode.DONE):
        _print_summary(outcome.report, outcome.run_dir, console)
    if outcome.exit_code != ExitCode.DONE:
        logs = "" if outcome.is_refused or interrupted else f"; logs are in {short_path(outcome.run_dir / 'logs')}"
        _complain(f"{outcome.reason}{logs}")
    if json_:
        where = {} if outcome.is_refused else {"run_dir": str(outcome.run_dir)}
        try:
            typer.echo(json.dumps(outcome.report or {"job": job, "state": "failed", "weights": None, **where}))
        except OSError as error:
            _complain(f"the report cannot be printed: {why_failed(error)}; see {short_path(outcome.run_dir)}")
            raise typer.Exit(outcome.exit_code or int(ExitCode.FAILED)) from None
    raise typer.Exit(outcome.exit_code)


def not_taken(named: LoadedJob, resumed: LoadedJob, run_dir: Path) -> list[str]:
    """Return what tells that a run goes on with its own values where the job file that was named has others."""
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


def _print_summary(report: dict[str, Any], run_dir: Path, console: Console) -> None:
    for line in summary_lines(report, run_dir):
        console.print(line, soft_wrap=True)  # a path stays one line, to be copied


def _coordinator(place: str, tls_dir: Path | None) -> CoordinatorClient:
    return CoordinatorClient(find_coordinator(place, wait_s=0.0), credentials=credentials_in(tls_dir))


def _complain(text: str) -> None:
    lossy(sys.stderr, "error lines").write(f"parashard: {text}\n")  # the one place that speaks to standard error
