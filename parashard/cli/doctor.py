"""The command `parashard doctor`: find problems of machines and networks, and say what to do."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from parashard.cli.options import Sets, TlsDir, job_flags, loaded_job
from parashard.doctor import findings, report
from parashard.doctor.facts import Network, Service
from parashard.doctor.findings import Finding, Severity
from parashard.doctor.hosts import Asked, look_at
from parashard.doctor.service import look_at_service
from parashard.errors import ConfigurationError
from parashard.job.sections import ClusterOptions
from parashard.launch.host_file import hosts_in
from parashard.launch.run_folders import RUNS, check_in_progress, coordinator_at, place_of
from parashard.process.addresses import split_address
from parashard.process.shell import ExitCode
from parashard.security.given_credentials import credentials_in

COLOURS = {Severity.PROBLEM: "red", Severity.WARNING: "yellow", Severity.NOTE: "blue"}
WIDTH_MAX = 120


def doctor(
    context: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="HOSTFILE|ADDR|RUN",
            help="A file of hosts, as --on ssh:HOSTFILE takes it; or host:port of something that runs; or a run. "
            "Default: this machine.",
        ),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(
            metavar="JOB.toml", help="Check what this job would use: its ports, its interface and its store, too."
        ),
    ] = None,
    set_: Sets = None,
    tls_dir: TlsDir = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print what was measured and found as one JSON object.")
    ] = False,
) -> None:
    """Check machines, and the network between them, for a job; exit code 1 where one would not work.

    Of a HOSTFILE every pair of hosts measures its link both ways, by ports that the job would use. Of ADDR: what
    answers there, how quickly, and whether the rest of its job is reached from here.
    """
    seen: Network | Service
    if what is None or Path(what).is_file():
        source = context.get_parameter_source("tls_dir")
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigurationError("found --tls-dir; allowed only with ADDR or RUN: links are measured without TLS")
        if what is not None and what.endswith(".toml"):
            raise ConfigurationError(f"found {what}, a job file; allowed: --job {what}, alone or after a HOSTFILE")
        hosts = hosts_in(Path(what)) if what is not None else []
        seen = look_at(hosts, _asked(job, set_, len(hosts)), lambda text: typer.echo(f"{text} ...", err=True))
        found = findings.in_order(findings.of_network(seen))
        shown = [report.of_hosts(seen), report.of_links(seen)]
    else:
        if job is not None or set_:
            raise ConfigurationError("--job and --set are for this machine and for hosts, not for something that runs")
        seen = look_at_service(_address(what), credentials_in(tls_dir))
        found = findings.in_order(findings.of_service(seen))
        shown = [report.of_service(seen)]
    if json_:
        plain = [one._asdict() for one in found]
        typer.echo(json.dumps({"measured": seen.plain(), "findings": plain}))
    else:
        _print(shown, found)
    if any(one.severity is Severity.PROBLEM for one in found):
        raise typer.Exit(ExitCode.FAILED)


def _asked(file: Path | None, sets: Sequence[str] | None, hosts: int) -> Asked:
    if file is None:
        if sets:
            raise ConfigurationError("--set changes keys of the job that --job names, and there is no --job")
        return Asked()
    job = loaded_job(file, job_flags(None, None, None, None, sets)).job
    return asked_for(job.cluster, job.checkpoint.url, hosts)


def asked_for(cluster: ClusterOptions, store: str, hosts: int) -> Asked:
    """Return the address, ports and store that a job uses here, and on `hosts` other machines."""
    of_shards = tuple(port for index in range(cluster.shards) for port in cluster.ports_of_shard(index))
    here = cluster.ports_of_coordinator() + (of_shards if not hosts and cluster.launcher == "local" else ())
    on_each = 2 * -(-cluster.shards // max(1, hosts))  # of ports that are all alike: any, or any of a range
    there = of_shards[:on_each] if len(set(of_shards)) == 1 else of_shards
    if hosts and not store:  # checkpoints would be in the run's folder
        store = str(RUNS.absolute())
    return Asked(cluster.listens_on, here, there, store)


def _address(what: str) -> str:
    place = place_of(what)
    if what and Path(place).is_dir():
        check_in_progress(place)
        return coordinator_at(place)
    try:
        split_address(what)
    except ConfigurationError as error:
        raise ConfigurationError(f"{what!r} is neither a file of hosts nor a run, and {error.message}") from None
    return what


def _print(shown: list[list[str]], found: list[Finding]) -> None:
    width = min(shutil.get_terminal_size().columns, WIDTH_MAX) if sys.stdout.isatty() else 0
    for lines in shown:
        if lines:
            typer.echo("\n".join(lines) + "\n")
    for severity, line in report.of_findings(found, width):
        typer.secho(line[:9], fg=COLOURS[severity], bold=True, nl=False)
        typer.echo(line[9:])
    typer.echo(("\n" if found else "") + report.summary(found))
