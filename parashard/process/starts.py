"""Starts: the flags of a service, as one frozen value.

`words` writes it as the arguments of `python -m parashard_coordinator`, `parashard_server` or `parashard_worker`, and
`read` reads them back. Each field is a flag, which users give too. A field with its default is left out, and the
flag's environment variable applies.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from parashard.errors import ConfigurationError
from parashard.process.addresses import Port, advertised, own_host, port_of
from parashard.process.shell import ExitCode, LogFormat

TLS_VARIABLE = "PARASHARD_TLS_DIR"
TRACE_VARIABLE = "PARASHARD_TRACE"


def seconds(text: str) -> float:
    """Read a time from the command line."""
    found = float(text)
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds: allowed are 0 and more")
    return found


def exit_code(text: str) -> int:
    """Read an exit code from the command line; the system would take 256 for 0."""
    number = int(text)
    if not 0 <= number < 256:
        raise argparse.ArgumentTypeError(f"{number} is not an exit code: allowed are 0 to 255")
    return number


def _worded(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader whose ConfigurationErrors the parser prints after the flag's name."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(error.message) from None

    return reader


def _flag(
    text: str, kind: Callable[[str], Any] = str, default: Any = MISSING, *, variable: str = "", **more: Any
) -> Any:
    """Declare a field by its help, reader, default, environment variable, and more arguments of `add_argument`."""
    return field(default=default, metadata={"kind": kind, "variable": variable, "help": text, **more})


@dataclass(frozen=True, kw_only=True)
class Start:
    """Flags of every service."""

    description: ClassVar[str] = "A service."

    host: str = _flag(
        "address to listen on; auto: what this machine's own name stands for; interface:NAME or interface:NETWORK, "
        "such as interface:eth1: this machine's address there (default: %(default)s)",
        _worded(own_host),
        "127.0.0.1",
    )
    insecure: bool = _flag("allow a --host off loopback without --tls-dir: open to any client", bool, False)
    tls_dir: Path | None = _flag(
        f"folder with ca.pem, cert.pem, key.pem: talk inside mutual TLS (default: {TLS_VARIABLE})",
        Path,
        None,
        variable=TLS_VARIABLE,
    )
    port: Port = _flag(
        "gRPC port; 0 picks a free one, 7000-7099 a free one of these", _worded(port_of), 0, metavar="PORT"
    )
    http_port: Port = _flag("port of /metrics, /livez, /readyz, likewise", _worded(port_of), 0, metavar="PORT")
    advertise: str | None = _flag(
        "address to tell others, where it is not the one we listen on; without a port: that of each port",
        _worded(advertised),
        None,
        metavar="HOST[:PORT]",
    )
    address_file: Path | None = _flag("file to write the address we listen on into, as JSON", Path, None)
    stopped_exit_code: int = _flag(
        "exit code after SIGTERM or SIGINT, where 0 would mean that no restart is needed (default: 0)",
        exit_code,
        int(ExitCode.DONE),
        metavar="CODE",
    )
    trace: str = _flag(
        f"send spans of every step by OpenTelemetry (default: {TRACE_VARIABLE}); docs/tracing.md",
        str,
        "",
        variable=TRACE_VARIABLE,  # unchanged: `parashard.telemetry.tracing` checks it
        action="store_const",
        const="1",
    )
    log_format: LogFormat = _flag(
        "how events are written to standard error: text, logfmt or json (default: %(default)s)",
        LogFormat,
        LogFormat.LOGFMT,
        choices=list(LogFormat),
    )
    lifeline: int | None = _flag("end when this inherited pipe closes: its writer is our parent", int, None)

    @classmethod
    def read(cls, words: Sequence[str] | None = None) -> Self:
        """Read the words of a command line; None: those of this process."""
        parser = argparse.ArgumentParser(description=cls.description)
        for one in fields(cls):
            more = dict(one.metadata)
            kind, variable = more.pop("kind"), more.pop("variable")
            if one.default is MISSING:
                more["required"] = True
            else:
                default = list(one.default) if isinstance(one.default, tuple) else one.default
                more["default"] = (os.environ.get(variable) if variable else None) or default
            if kind is bool:
                more["action"] = "store_true"
            elif "const" not in more:
                more["type"] = kind
            parser.add_argument(_flag_of(one.name), **more)
        found = vars(parser.parse_args(words))
        given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}
        return cls(**given)

    def words(self) -> list[str]:
        """Return these flags as a command line."""
        words = []
        for one in fields(self):
            value, flag = getattr(self, one.name), _flag_of(one.name)
            if value == one.default:
                continue
            if isinstance(value, tuple):
                words += [word for each in value for word in (flag, str(each))]
            else:
                words += [flag] if value is True or "const" in one.metadata else [flag, str(value)]
        return words


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class CoordinatorStart(Start):
    """Flags of a coordinator."""

    description: ClassVar[str] = "The parashard coordinator: leases steps and watches the job."

    job: Path = _flag("the job file", Path)
    run_dir: Path = _flag("where the run's files go", Path)
    run_id: str = _flag("the run; the same at every start of its coordinator", str, "")
    again: bool = _flag("the launcher has started this run's coordinator before", bool, False)
    resume: bool = _flag("take up the run that the checkpoint store has", bool, False)
    from_checkpoint: str = _flag("the drained checkpoint that a new placement starts from", str, "")
    init: Path | None = _flag("safetensors file with the first weights", Path, None)
    declaration: Path | None = _flag(
        "folder with what another process declares of data and model, which are not opened here then", Path, None
    )
    open: bool = _flag("lease only the steps that the launcher has scheduled", bool, False)
    model_folder: Path | None = _flag("where a model of your own is looked up", Path, None)
    callbacks: str | None = _flag(
        "the launcher runs callbacks, which may decide with `decide`", str, None, choices=["follow", "decide"]
    )
    callbacks_ahead: int | None = _flag(
        "epochs that training may be ahead of callbacks; 0: it waits for them", int, None, choices=[0, 1]
    )
    store_evaluated: bool = _flag("keep the weights of every evaluation", bool, False)
    set: tuple[str, ...] = _flag(
        "over the job file, such as cluster.shards=2", str, (), action="append", metavar="KEY=VALUE"
    )
    linger_s: float = _flag(
        "seconds to stay after the job's end, for others to hear of it (default: ever)", seconds, math.inf
    )
    kubernetes_job: str = _flag("the workers' Job, with cluster.launcher=kubernetes", str, "")


@dataclass(frozen=True, kw_only=True)
class ConnectedStart(Start):
    """Flags of a service that connects to a coordinator."""

    connect: str = _flag("the coordinator: host:port, or a run directory")
    give_up_s: float = _flag(
        "stop, as after SIGTERM, once the coordinator has been away for so many seconds (default: never)",
        seconds,
        math.inf,
    )


@dataclass(frozen=True, kw_only=True)
class ShardStart(ConnectedStart):
    """Flags of a shard."""

    description: ClassVar[str] = "One parashard shard: holds variables and applies pushes."

    index: int = _flag("which shard of the plan this is", int)
    device: str = _flag("cpu, cuda or cuda:N (default: what the job file says)", str, "")
    data_port: Port = _flag("port of the stream server, likewise", _worded(port_of), 0, metavar="PORT")
    advertise_data: str | None = _flag(
        "stream server's address to tell others, where it is neither the one we listen on nor that of --advertise HOST",
        _worded(advertised),
        None,
        metavar="HOST[:PORT]",
    )
    linger_s: float = _flag("end so many seconds after the job is done (default: never)", seconds, math.inf)


@dataclass(frozen=True, kw_only=True)
class WorkerStart(ConnectedStart):
    """Flags of a worker; the job has all other settings."""

    description: ClassVar[str] = "One parashard worker: leases steps, computes gradients, pushes them."

    name: str = _flag("its name in the job, such as worker-0 (default: the next free one)", str, "")
    device: str = _flag("auto, cpu, cuda or cuda:N (default: what the job file says)", str, "")
    set: tuple[str, ...] = _flag("such as data.path=/mnt/mnist", str, (), action="append", metavar="KEY=VALUE")
    model_folder: Path | None = _flag("where a model of your own is looked up on this machine", Path, None)
