"""The command `parashard health`, by which container engines and people check one service."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Annotated

import typer

from parashard.errors import NotReady, Unreachable, WrongRun
from parashard.process.addresses import join_address, own_host, split_address
from parashard.process.arguments import finite

REASON_BYTES_MAX = 200  # read of an answer: any program may listen there


def ask(address: str, *, live: bool, timeout_s: float) -> None:
    """Raise unless the service at an HTTP address is ready, or with `live` answers at all.

    Raises NotReady with its reason if it answers that it is not, Unreachable if nothing answers, and WrongRun if
    something other than a parashard service answers.
    """
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores proxies of the environment
    try:
        with directly.open(f"http://{address}/{'livez' if live else 'readyz'}", timeout=timeout_s) as answer:
            said = answer.read(REASON_BYTES_MAX)
    except urllib.error.HTTPError as error:
        said = error.read(REASON_BYTES_MAX)
        if error.code == 503:
            raise NotReady(_text(said) or "no reason given", peer=address) from None
        raise WrongRun(f"HTTP status {error.code}: no HTTP port of a parashard service", peer=address) from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Unreachable(f"no answer: {reason}", peer=address) from None
    if said != b"ok\n":
        raise WrongRun(f"it says {_text(said)!r}: no HTTP port of a parashard service", peer=address)


def _text(said: bytes) -> str:
    return said.decode(errors="replace").strip()


def health(
    where: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="host:port of its HTTP port; host `auto` is this machine.")
    ],
    live: Annotated[bool, typer.Option("--live", help="Ask only whether it answers, not whether it is ready.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=600, callback=finite, help="How long to wait for it.")] = 3.0,
) -> None:
    """Ask a coordinator, shard or worker whether it is ready: exit code 0 if so, 75 if not."""
    host, port = split_address(where)
    ask(join_address(own_host(host), port), live=live, timeout_s=timeout_s)
    typer.echo("ok")
