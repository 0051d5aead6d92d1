"""The command `parashard worker`, which becomes a worker's process."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from parashard.cli.options import DeviceName, LogFormatName, Sets, TlsDir, Trace, complete_runs
from parashard.errors import ConfigurationError
from parashard.launch.local_cluster import MODULES, WORKER_ARGUMENTS
from parashard.launch.run_folders import place_of
from parashard.process.arguments import finite
from parashard.process.shell import LogFormat
from parashard.process.starts import WorkerStart


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
    log_format: LogFormatName = LogFormat.TEXT,
    host: Annotated[
        str, typer.Option(help="Where it serves /metrics and /readyz; auto: what this machine's name stands for.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of these; 0: any that is free.")] = 0,
    give_up_s: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=finite,
            help="Stop once the coordinator has been away for so long; default: cluster.retry_budget_s, as a failure.",
        ),
    ] = None,
    stopped_exit_code: Annotated[
        int, typer.Option(min=0, max=255, help="Exit code after SIGTERM, where 0 would mean that the work is done.")
    ] = 0,
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT ARGS...]",
            help="Of a run that a script has started: the script and its arguments, which come last.",
        ),
    ] = None,
) -> None:
    """Join a running job with one more worker, from anywhere.

    A worker of a script's run is the same script, with the same arguments and the same data: `parashard worker
    --connect RUN train.py ARGS`.
    """
    place = place_of(connect)
    if script and Path(place).is_dir():
        place = str(Path(place).absolute())  # a script may go to another folder
    start = WorkerStart(
        connect=place,
        name=name,
        device=device or "",
        host=host,
        http_port=http_port,
        stopped_exit_code=stopped_exit_code,
        log_format=log_format,
        set=tuple(set_ or ()),
        give_up_s=math.inf if give_up_s is None else give_up_s,
        model_folder=model_folder and model_folder.absolute(),
        tls_dir=tls_dir and tls_dir.absolute(),
        trace="1" if trace else "",
    )
    if script:
        environ = {**os.environ, WORKER_ARGUMENTS: json.dumps(start.words())}
        os.execve(sys.executable, [sys.executable, *_checked(script)], environ)
    os.execv(sys.executable, [sys.executable, "-P", "-m", MODULES["worker"], *start.words()])


def _checked(script: list[str]) -> list[str]:
    if not Path(script[0]).is_file():
        raise ConfigurationError(f"{script[0]} is not there: the script of a run comes after the options")
    return script
