"""Coordinator watchdog: stop a process in an orderly way after its coordinator has been unreachable for a while.

For container engines that restart a failed process without end: the process exits as if asked to stop. Called by
`parashard_server.__main__` and `parashard_worker.__main__`.
"""

from __future__ import annotations

import math
import threading
from argparse import ArgumentParser, Namespace

from parashard.process.arguments import seconds
from parashard.process.logs import log
from parashard.process.shell import Stop
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.security.credentials import Credentials

LOOK_S = 1.0


def connecting_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of a process that has a coordinator."""
    parser.add_argument("--connect", required=True, help="the coordinator: host:port, or a run directory")
    parser.add_argument(
        "--give-up-s",
        type=seconds,
        default=math.inf,
        help="stop, as after SIGTERM, once the coordinator has been away for so many seconds (default: never)",
    )


def client_of(arguments: Namespace, stop: Stop, credentials: Credentials | None) -> CoordinatorClient:
    """Return a shard's or a worker's client of its coordinator; with `--give-up-s` start the watchdog.

    Parameters
    ----------
    arguments : Namespace
        With `connect`, a run directory or host:port, and `give_up_s`.
    stop : Stop
        Ends every wait for the coordinator; set by the watchdog.
    credentials : Credentials, optional
        Shown to the coordinator.
    """
    client = CoordinatorClient(
        find_coordinator(arguments.connect, cancelled=stop.event),
        cancelled=stop.event,
        where=arguments.connect,
        credentials=credentials,
    )
    if arguments.give_up_s < math.inf:
        client.retry_budget_s = math.inf  # the watchdog ends the retries
        threading.Thread(
            target=give_up, args=(client, stop, arguments.give_up_s), name="giving-up", daemon=True
        ).start()
    return client


def give_up(client: CoordinatorClient, stop: Stop, after_s: float) -> None:
    """Request a stop once calls have failed to reach the coordinator for so long.

    Counts checks, not seconds of a clock: a process that was paused has not been waiting, nor has one that made no
    call, such as a shard that restores.
    """
    away_s = 0.0
    while not stop.wait(LOOK_S):
        away_s = away_s + LOOK_S if client.unanswered else 0.0
        if away_s >= after_s:
            log.warning("giving-up", coordinator=client.address, away_s=away_s)
            stop.ask(f"the coordinator has been away for {away_s:.0f} s")
