"""The command `parashard chaos`: run a job under injected faults, and report whether promises were kept."""

from __future__ import annotations

import json
import secrets
import sys
from typing import Annotated, Any

import typer

from parashard.chaos.runner import THROUGH_LINKS, UNDER_CHAOS, kinds_of, run_chaos
from parashard.cli.main import complain
from parashard.cli.options import (
    Consistency,
    JobFile,
    ReportJson,
    RunDir,
    Sets,
    Shards,
    TlsDir,
    Workers,
    begin_run,
    job_flags,
    loaded_job,
)
from parashard.display.live import console_for, open_view
from parashard.display.status_tables import metric_figures
from parashard.figures import count
from parashard.job.load import load_job
from parashard.launch.run import Outcome
from parashard.launch.run_folders import new_run_dir
from parashard.launch.runs import Run, job_credentials
from parashard.process.arguments import finite
from parashard.process.shell import ExitCode

PROMISES = ("ledger_wrong", "rows_wrong", "torn")
"""Figures of the oracles: anything but 0 is a broken promise."""


def chaos(
    job: JobFile,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Repeats the schedule of faults; default: drawn, and told.")
    ] = None,
    mean_interval_s: Annotated[
        float, typer.Option(min=0.05, callback=finite, help="Mean time between the beginnings of two faults.")
    ] = 5.0,
    faults: Annotated[int | None, typer.Option(min=0, help="Stop after so many; default: when the job ends.")] = None,
    kill: Annotated[
        str, typer.Option(metavar="ROLES", help="SIGKILL to worker, shard, coordinator: any of them, with commas.")
    ] = "",
    pause: Annotated[bool, typer.Option("--pause", help="SIGSTOP for up to 5 s, to any process.")] = False,
    hang: Annotated[bool, typer.Option("--hang", help="SIGSTOP without end, to any process.")] = False,
    stray: Annotated[
        bool,
        typer.Option("--stray", help="Second shards and coordinators, which claim an incarnation and die."),
    ] = False,
    partition: Annotated[
        bool,
        typer.Option("--partition", help="Cut links for up to 5 s, both ways or one way; reset their connections."),
    ] = False,
    delay: Annotated[
        bool, typer.Option("--delay", help="Delay what links carry for up to 5 s, or deliver it twice.")
    ] = False,
    disk: Annotated[
        bool,
        typer.Option("--disk", help="Fill the file system of --run-dir for up to 5 s: a small one of its own."),
    ] = False,
    shards: Shards = None,
    workers: Workers = None,
    consistency: Consistency = None,
    set_: Sets = None,
    run_dir: RunDir = None,
    tls_dir: TlsDir = None,
    json_: ReportJson = False,
) -> None:
    """Run a job under faults, of all kinds but --disk unless some are asked for; tell whether promises were kept."""
    flags = [*UNDER_CHAOS, *job_flags(shards, workers, consistency, None, set_)]
    loaded = loaded_job(job, flags)
    automatic = loaded.job.cluster.transport == "auto"
    if automatic:
        loaded = load_job(job, [*flags, THROUGH_LINKS])
    groups = {"--pause": pause, "--hang": hang, "--stray": stray, "--partition": partition, "--delay": delay}
    groups["--disk"] = disk
    asked = [flag for flag, wanted in groups.items() if wanted]
    kinds = kinds_of([role.strip() for role in kill.split(",") if role.strip()], asked)
    drawn = secrets.randbits(32) if seed is None else seed
    credentials = job_credentials(tls_dir)
    keep = run_dir is not None and run_dir.exists()
    folder = new_run_dir(run_dir, loaded.job.job.name)
    console = console_for(sys.stderr if json_ else sys.stdout)
    view = open_view(console, only_terminal=json_)
    if automatic:
        view.say('chaos: cluster.transport is "auto" and runs as "tcp": shared memory would go past the links')
    begins = Run(loaded, folder, credentials=credentials)
    outcome = begin_run(folder, view, lambda: run_chaos(begins, view, drawn, mean_interval_s, faults, kinds), keep=keep)
    broken = broken_promises(outcome.report)
    if json_:
        typer.echo(json.dumps({"job": loaded.job.job.name, "state": "failed", **outcome.report}))
    else:
        typer.echo("\n".join(outcome_lines(outcome)))
    code = outcome.exit_code
    if code != ExitCode.DONE or broken:
        why = "; ".join([*broken, *([outcome.reason] if code != ExitCode.DONE else [])])
        see = "" if outcome.is_refused else f"; see {folder}"
        complain(f"{why}; --seed {drawn}{see}")
        code = code or int(ExitCode.FAILED)
    raise typer.Exit(code)


def broken_promises(report: dict[str, Any]) -> list[str]:
    """Return the broken promises of a report, as text; empty if all were kept."""
    broken = [f"{name} is {report[name]}, not 0" for name in PROMISES if report.get(name)]
    applied, total = report.get("steps_applied"), report.get("steps_total")
    if report.get("state") == "done" and any(steps != total for steps in applied or ()):
        broken.append(f"steps applied are {applied}, not {total} on every shard")
    return broken


def outcome_lines(outcome: Outcome) -> list[str]:
    """Return the summary of a job under faults, as lines."""
    report = outcome.report
    struck = ", ".join(f"{times} {kind}" for kind, times in report["faults"].items() if times)
    rows = [("faults", f"{count(sum(report['faults'].values()))}: {struck or 'none'}")]
    if "steps_total" in report:
        applied = "; ".join(map(count, report["steps_applied"]))
        rows.append(("steps", f"{count(report['steps_total'])}, applied by the shards: {applied}"))
    rows += [(name, count(report[name])) for name in PROMISES if name in report]
    rows += metric_figures((name, value) for name, value in report.get("held_out", {}).items() if value is not None)
    rows += [("sha256", report["weights_sha256"])] if "weights_sha256" in report else []
    restarts = ", ".join(f"{report.get(f'{role}_restarts', 0)} {role}" for role in ("worker", "shard", "coordinator"))
    rows += [("restarts", restarts), ("transport", report["transport"]), ("seed", str(report["seed"]))]
    rows.append(("run", str(outcome.run_dir)))
    width = max(len(name) for name, _ in rows)
    first = f"{report.get('job', 'job')}: {report.get('state', 'failed')}: {report.get('reason', outcome.reason)}"
    return [first, *(f"{name:<{width}}  {value}" for name, value in rows)]
