"""Coordinator watchdog: stop a process in an orderly way after its coordinator has been unreachable for a while.

For container engines that restart a failed process without end: the process exits as if asked to stop.
"""

from __future__ import annotations

import math
import threading

from parashard.process.logs import log
from parashard.process.shell import Stop
from parashard.process.starts import ConnectedStart
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.security.credentials import Credentials

LOOK_S = 1.0


def client_of(start: ConnectedStart, stop: Stop, credentials: Credentials | None) -> CoordinatorClient:
    """Return a shard's or a worker's client of its coordinator; with `--give-up-s` start the watchdog."""
    client = CoordinatorClient(
        find_coordinator(start.connect, cancelled=stop.event),
        cancelled=stop.event,
        where=start.connect,
        credentials=credentials,
    )
    if start.give_up_s < math.inf:
        client.retry_budget_s = math.inf  # the watchdog ends the retries
        threading.Thread(target=give_up, args=(client, stop, start.give_up_s), name="giving-up", daemon=True).start()
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
