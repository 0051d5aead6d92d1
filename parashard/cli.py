"""The command line: `parashard run`, `config`, `status`, `scale`, `worker`; the others come from files of their own.

Parses, calls, prints; decides nothing. Errors go to standard error in one line, never a traceback of a user's mistake.
Exit codes: 0 done, 1 failed, 2 configuration, 3 fenced, 75 retry later, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parashard import __version__
from parashard.arguments import credentials_in
from parashard.cli_certs import certs
from parashard.cli_chaos import chaos
from parashard.cli_checkpoint import checkpoint
from parashard.cli_health import health
from parashard.cli_options import Sets, TlsDir, Trace, told_job
from parashard.cli_render import render_app
from parashard.coordinator_client import CoordinatorClient, find_coordinator, run_id_in
from parashard.errors import ConfigurationError, ParashardError, Unreachable, WrongRun
from parashard.job.layers import Override, parse_set
from parashard.job.load import LoadedJob, describe
from parashard.live import NoView, open_view, render
from parashard.metric_text import metric_name, metric_value
from parashard.process import ExitCode, exit_code_of
from parashard.run import Outcome, run_job
from parashard.run_folders import new_run_dir, newest_run, read_report, resumed_run_dir
from parashard.transfer import percent

app = typer.Typer(
    help="A parameter server for training on machines that come and go.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(render_app, name="render")
app.add_typer(certs, name="certs")
app.command()(chaos)
app.command()(health)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")]
Shards = Annotated[int | None, typer.Option(help="Number of shards (cluster.shards).")]
Workers = Annotated[int | None, typer.Option(help="Number of workers (cluster.workers).")]
Consistency = Annotated[str | None, typer.Option(help="async, ssp:K or sync:N (consistency.policy).")]
DeviceName = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N (cluster.device).")]
Where = Annotated[
    str | None, typer.Argument(metavar="[ADDR|RUN_DIR]", help="The coordinator; default: the newest run under runs/.")
]


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
    from_checkpoint: Annotated[
        str, typer.Option(metavar="jN", help="With --resume and other --shards: start from this drained checkpoint.")
    ] = "",
    init: Annotated[Path | None, typer.Option(help="safetensors file to start from.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to copy the final weights.")] = None,
    tls_dir: TlsDir = None,
    trace: Trace = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as one JSON line.")] = False,
) -> None:
    """Train a job on a local cluster, and show how it goes."""
    loaded = _load(job, shards, workers, consistency, device, set_)
    if resume and init is not None:
        raise ConfigurationError("--init with --resume: a run that goes on has its weights; allowed: one of the two")
    if from_checkpoint and not resume:
        raise ConfigurationError("--from-checkpoint needs --resume: it names a checkpoint of a run that goes on")
    name = loaded.job.job.name
    folder = resumed_run_dir(run_dir, name) if resume else new_run_dir(run_dir, name)
    console = Console(stderr=json_)
    view = open_view(console) if not json_ or console.is_terminal else NoView()
    outcome = run_job(
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
    if outcome.exit_code != ExitCode.DONE:
        _complain(f"{outcome.reason}; logs are in {_short(outcome.run_dir / 'logs')}")
    elif not json_:
        console.print(summary(outcome))
    if json_:
        typer.echo(json.dumps(outcome.report or {"job": loaded.job.job.name, "state": "failed"}))
    raise typer.Exit(outcome.exit_code)


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
    rows = describe(_load(job, shards, workers, consistency, device, set_))
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
    place = where or str(newest_run())
    try:
        reply = _coordinator(place, tls_dir).get_status(run_id_in(place))
    except (Unreachable, WrongRun):
        report = read_report(Path(place))
        if not report:
            raise
        # The run is over and its coordinator gone: the report says how it went.
        typer.echo(json.dumps(report, indent=None if json_ else 2))
        return
    if json_:
        typer.echo(
            json.dumps(
                MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            )
        )
    else:
        Console().print(render(reply))


@app.command()
def scale(
    workers: Annotated[int, typer.Option(min=0, max=4096, help="Workers to keep alive, 0 to 4096.")],
    where: Where = None,
    tls_dir: TlsDir = None,
) -> None:
    """Change the number of workers of a running job, on a local cluster or on Kubernetes."""
    place = where or str(newest_run())
    reply = _coordinator(place, tls_dir).scale(workers, run_id_in(place))
    typer.echo(f"{reply.workers_wanted} workers wanted")


@app.command()
def worker(
    connect: Annotated[str, typer.Option(help="The coordinator: host:port or a run directory.")],
    device: DeviceName = None,
    name: Annotated[str, typer.Option(help="Its name in the job; default: the next free one.")] = "",
    set_: Sets = None,
    model_folder: Annotated[Path | None, typer.Option(help="Where a model of your own lies on this machine.")] = None,
    tls_dir: TlsDir = None,
    trace: Trace = False,
) -> None:
    """Join a running job with one more worker, from anywhere."""
    arguments = ["--connect", connect, "--name", name, "--device", device or ""]
    arguments += [part for text in set_ or () for part in ("--set", text)]
    if model_folder is not None:
        arguments += ["--model-folder", str(model_folder.absolute())]
    if tls_dir is not None:
        arguments += ["--tls-dir", str(tls_dir.absolute())]
    arguments += ["--trace"] if trace else []
    os.execv(sys.executable, [sys.executable, "-P", "-m", "worker", *arguments])


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"parashard {__version__}")


def main() -> None:
    """Run the command line; errors of ours become one line and an exit code."""
    try:
        app()
    except ParashardError as error:
        _complain(str(error))
        sys.exit(int(exit_code_of(error)))


def summary(outcome: Outcome) -> Table:
    """Return a finished run's figures as a table."""
    report, table = outcome.report, Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for key, value in _summary_rows(report, outcome.run_dir):
        table.add_row(Text(key), Text(value) if isinstance(value, str) else value)  # text, never markup: paths have [
    return table


def _summary_rows(report: dict[str, Any], run_dir: Path) -> list[tuple[str, str | Text]]:
    rows: list[tuple[str, str | Text]] = [
        (report["job"], Text.assemble(("done", "green"), f": {report['reason']}")),
        ("steps", f"{report['steps_total']:,}, applied by the shards: {', '.join(map(str, report['steps_applied']))}"),
        ("throughput", f"{report['examples_per_s']:,.0f} examples/s over {report['wall_s']:.1f} s"),
    ]
    found = {f"held-out {metric_name(name)}": value for name, value in report["metrics"].items()}
    for name, value in (found or {"training loss": report["training_loss"]}).items():
        if value is not None:
            rows.append((name, metric_value(value)))
    staleness = report["staleness"]
    rows.append(("staleness", f"p50 {staleness['p50']}, p95 {staleness['p95']}, max {staleness['max']} pushes"))
    rows.append(("step lag", f"max {report['step_lag']['max']} steps"))
    moved = report["bytes"]
    rows.append(("transfer", f"{percent(report['transfer']['hidden'])} hidden behind computing"))
    rows.append(
        (
            "bytes",
            f"{moved['pushed'] / 2**20:,.1f} MiB pushed, {moved['pulled'] / 2**20:,.1f} MiB pulled; "
            f"{percent(moved['saved'])} of all saved",
        )
    )
    rows += [(name, str(report[name])) for name in ("ledger_wrong", "torn") if name in report]
    rows.append(("duplicates", f"{report['duplicate_pushes']} pushes acknowledged and not applied"))
    if report["worker_restarts"]:
        rows.append(("restarts", f"{report['worker_restarts']} workers"))
    rows.append(("weights", f"{_short(run_dir / 'weights.safetensors')}  sha256 {report['weights_sha256'][:16]}"))
    rows.append(("run", _short(run_dir)))
    return rows


def _load(
    job: Path,
    shards: int | None,
    workers: int | None,
    consistency: str | None,
    device: str | None,
    sets: Sequence[str] | None,
) -> LoadedJob:
    flags: list[Override] = [parse_set(text) for text in sets or ()]
    for key, value, flag in (
        ("cluster.shards", shards, "--shards"),
        ("cluster.workers", workers, "--workers"),
        ("consistency.policy", consistency, "--consistency"),
        ("cluster.device", device, "--device"),
    ):
        if value is not None:
            flags.append((key, value, flag))
    return told_job(job, flags)


def _coordinator(place: str, tls_dir: Path | None) -> CoordinatorClient:
    return CoordinatorClient(find_coordinator(place, wait_s=0.0), credentials=credentials_in(tls_dir))


def _complain(text: str) -> None:
    print(f"parashard: {text}", file=sys.stderr, flush=True)  # noqa: T201  # the one place that speaks to standard error


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
