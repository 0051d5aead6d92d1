"""The command line of certificates: `parashard certs`, an authority of your own for development."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from parashard.cli.main import App, folder_of
from parashard.process.addresses import own_host
from parashard.security.certs import has_authority, make_authority
from parashard.security.certs import issue as issue_certificate
from parashard.security.identity import OF_A_JOB, SERVING, Identity, Role, in_words

AUTHORITY_DAYS = 365
CLUSTER_AUTHORITY_DAYS = 3650  # it is never renewed, and its key never leaves the volume that it was made in

certs = App(help="Make certificates for mutual TLS: an authority of your own, for development.", no_args_is_help=True)


Authority = Annotated[
    Path, typer.Argument(metavar="CA_DIR", parser=folder_of, help="Folder of the authority: ca.pem and ca-key.pem.")
]
KeepCa = Annotated[
    bool, typer.Option("--keep-ca", help="Go on trusting the authorities that are in ca.pem already; to change them.")
]


@certs.command()
def init(
    folder: Authority,
    valid_days: Annotated[int, typer.Option(min=1, max=3650, help="Days from now, 1 to 3650.")] = AUTHORITY_DAYS,
) -> None:
    """Make a certificate authority; keep its key where no shard or worker runs."""
    make_authority(folder, valid_days=valid_days)
    typer.echo(f"{folder}: an authority for {valid_days} days; ca-key.pem is its secret")


@certs.command()
def issue(
    authority: Authority,
    output: Annotated[
        Path, typer.Argument(metavar="TLS_DIR", parser=folder_of, help="Folder to fill: ca.pem, cert.pem, key.pem.")
    ],
    role: Annotated[list[Role], typer.Option(help="What its holder is; several times for a process that is several.")],
    name: Annotated[str, typer.Option(help="Whose it is, such as worker-0; default: the role.")] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address that a shard, the coordinator or a server is connected to by, besides loopback; "
            "auto, interface:NAME: this machine's, as --host of a service takes them."
        ),
    ] = None,
    valid_days: Annotated[int, typer.Option(min=1, max=3650, help="Days from now, 1 to 3650.")] = 30,
    keep_ca: KeepCa = False,
) -> None:
    """Issue a certificate, or renew it in place: processes that run take up the new one by themselves.

    A local cluster is one user's: `parashard run --tls-dir` takes one certificate with the roles shard, worker,
    coordinator and operator.
    """
    identities = [Identity(one, name or str(one)) for one in dict.fromkeys(role)]
    hosts = [own_host(one) for one in host or ()]
    cut = issue_certificate(authority, output, identities, hosts=hosts, valid_days=valid_days, keep_ca=keep_ca)
    typer.echo(f"{output}: {in_words(identities)}, {_life(valid_days, cut)}")


@certs.command()
def cluster(
    authority: Authority,
    output: Annotated[
        Path, typer.Argument(metavar="TLS_DIR", parser=folder_of, help="Folder to fill with a folder for each process.")
    ],
    shards: Annotated[int, typer.Option(min=1, max=4096, help="How many shards, 1 to 4096.")],
    valid_days: Annotated[int, typer.Option(min=1, max=3650, help="Days from now, 1 to 3650.")] = 30,
    keep_ca: KeepCa = False,
) -> None:
    """Make or renew what all processes of a job need, and the authority, for ten years, if there is none.

    TLS_DIR gets the folders coordinator, shard-0 and so on, worker and operator. The coordinator and each shard are
    connected to by their folder's name.
    """
    holders = [Identity(Role.COORDINATOR, "coordinator"), Identity(Role.WORKER, "worker")]
    holders += [Identity(Role.SHARD, f"shard-{index}") for index in range(shards)]
    holders += [Identity(Role.OPERATOR, "operator")]
    _issue_all(authority, output, [[holder] for holder in holders], valid_days, keep_ca=keep_ca)


@certs.command()
def script(
    authority: Authority,
    output: Annotated[
        Path, typer.Argument(metavar="TLS_DIR", parser=folder_of, help="Folder to fill with a folder for each.")
    ],
    host: Annotated[str, typer.Option(help="Name of the machine or container that runs the script.")] = "train",
    valid_days: Annotated[int, typer.Option(min=1, max=3650, help="Days from now, 1 to 3650.")] = 30,
    keep_ca: KeepCa = False,
) -> None:
    """Make or renew what a script and its workers elsewhere need, and the authority, for ten years, if there is none.

    TLS_DIR gets two folders: HOST, for the script that calls fit, with all four roles and this name; and worker.
    """
    train = [Identity(role, host) for role in OF_A_JOB]
    _issue_all(authority, output, [train, [Identity(Role.WORKER, "worker")]], valid_days, keep_ca=keep_ca)


def _issue_all(
    authority: Path, output: Path, holders: Sequence[Sequence[Identity]], valid_days: int, *, keep_ca: bool
) -> None:
    """Issue a certificate for each holder, in a folder of its name, which is also its host name."""
    if not has_authority(authority):
        make_authority(authority, valid_days=CLUSTER_AUTHORITY_DAYS)
    cut: datetime | None = None
    for identities in holders:
        name = identities[0].name
        hosts = [name] if any(identity.role in SERVING for identity in identities) else []
        cut = issue_certificate(
            authority, output / name, identities, hosts=hosts, valid_days=valid_days, keep_ca=keep_ca
        )
    typer.echo(f"{output}: {in_words(one for all_ in holders for one in all_)}, {_life(valid_days, cut)}")


def _life(valid_days: int, cut: datetime | None) -> str:
    return f"until {cut:%Y-%m-%d %H:%M:%S} UTC, when the authority expires" if cut else f"for {valid_days} days"
