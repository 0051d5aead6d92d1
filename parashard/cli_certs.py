"""The command line of certificates: `parashard certs init` and `issue`, an authority of one's own for development.

Parses, calls, prints; decides nothing. Registered in `parashard.cli`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parashard.security.certs import issue as issue_certificate
from parashard.security.certs import make_authority
from parashard.security.identity import Identity, Role, in_words

certs = typer.Typer(
    help="Make certificates for mutual TLS: an authority of your own, for development.", no_args_is_help=True
)

Authority = Annotated[Path, typer.Argument(metavar="CA_DIR", help="Folder of the authority: ca.pem and ca-key.pem.")]


@certs.command()
def init(
    folder: Authority,
    valid_days: Annotated[int, typer.Option(min=1, max=3650, help="Days from now, 1 to 3650.")] = 365,
) -> None:
    """Make a certificate authority; keep its key off the machines that train."""
    make_authority(folder, valid_days=valid_days)
    typer.echo(f"{folder}: an authority for {valid_days} days; ca-key.pem is its secret")


@certs.command()
def issue(
    authority: Authority,
    output: Annotated[Path, typer.Argument(metavar="TLS_DIR", help="Folder to fill: ca.pem, cert.pem, key.pem.")],
    role: Annotated[list[Role], typer.Option(help="What its holder is; several times for a process that is several.")],
    name: Annotated[str, typer.Option(help="Whose it is, such as worker-0; default: the role.")] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address that a shard or the coordinator is connected to by, besides loopback."),
    ] = None,
    valid_days: Annotated[int, typer.Option(min=1, max=3650, help="Days from now, 1 to 3650.")] = 30,
) -> None:
    """Issue a certificate, or renew it in place: processes that run take up the new one by themselves.

    A local cluster is one user's: `parashard run --tls-dir` takes one certificate with all four roles.
    """
    identities = [Identity(one, name or str(one)) for one in dict.fromkeys(role)]
    issue_certificate(authority, output, identities, hosts=host or (), valid_days=valid_days)
    typer.echo(f"{output}: {in_words(identities)}, for {valid_days} days")
