"""What befalls hosts: kinds of faults, and a schedule of them that is drawn from a seed. Knows no process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from network_hosts import Hosts
from switch import Line

BEYOND_S = 75.0
"""Longer than any deadline, lease, keepalive or retry budget of these jobs: a pull has 60 s, which is the longest."""

CUT = Line(cut=True)
LOSSY = Line(loss=0.2)
LATE = Line(delay_s=0.1)
SMALL_FRAMES = Line(frame_bytes_max=590)  # an MTU of 576 on the way, and nobody who says so


class Fault(NamedTuple):
    """One fault of the schedule."""

    kind: str
    host: str
    other: str  # whom it concerns, too
    seconds: float
    pause_s: float  # of quiet before it


@dataclass(frozen=True)
class Kind:
    """A kind of fault: how long it lasts, how often it is drawn, and how it begins; the stack has how it ends."""

    seconds: float
    weight: int
    begin: Callable[[Hosts, Fault, ExitStack], None]


def _lines(outgoing: Line | None, incoming: Line | None) -> Callable[[Hosts, Fault, ExitStack], None]:
    def begin(hosts: Hosts, fault: Fault, ends: ExitStack) -> None:
        host = hosts.by_name[fault.host]
        ends.callback(host.heal_lines)
        host.lines(outgoing, incoming)

    return begin


def _freeze(hosts: Hosts, fault: Fault, ends: ExitStack) -> None:
    ends.callback(hosts.by_name[fault.host].thaw)
    hosts.by_name[fault.host].freeze()


def _power(hosts: Hosts, fault: Fault, ends: ExitStack) -> None:
    ends.callback(hosts.by_name[fault.host].power_on)
    hosts.by_name[fault.host].power_off()


def _move(hosts: Hosts, fault: Fault, ends: ExitStack) -> None:
    hosts.move(fault.host)


def _duplicate(hosts: Hosts, fault: Fault, ends: ExitStack) -> None:
    ends.callback(hosts.give_address_back, fault.other, fault.host)
    hosts.take_address(fault.other, fault.host)


KINDS = {
    "link down 1 s": Kind(1.0, 4, _lines(CUT, CUT)),
    "link down 10 s": Kind(10.0, 3, _lines(CUT, CUT)),
    "link down beyond every deadline": Kind(BEYOND_S, 1, _lines(CUT, CUT)),
    "sends nothing": Kind(8.0, 2, _lines(CUT, None)),
    "hears nothing": Kind(8.0, 2, _lines(None, CUT)),
    "20 % loss": Kind(8.0, 3, _lines(LOSSY, LOSSY)),
    "100 ms delay": Kind(8.0, 3, _lines(LATE, LATE)),
    "frames above an MTU of 576 lost": Kind(8.0, 3, _lines(SMALL_FRAMES, SMALL_FRAMES)),
    "another address": Kind(1.0, 4, _move),
    "its address on another host, too": Kind(5.0, 3, _duplicate),
    "frozen": Kind(8.0, 3, _freeze),
    "power lost": Kind(3.0, 3, _power),
}


def draw(seed: int, count: int, hosts: Sequence[str], kinds: Sequence[str] = tuple(KINDS)) -> list[Fault]:
    """Return a schedule: every kind by its weight, in an order, on hosts and with pauses that follow from the seed.

    Each kind comes once before any comes by its weight, so that few faults have many kinds.
    """
    chance = random.Random(seed)
    deck = list(kinds)
    chance.shuffle(deck)
    while len(deck) < count:
        again = [kind for kind in kinds for _ in range(KINDS[kind].weight)]
        chance.shuffle(again)
        deck += again
    schedule = []
    for kind in deck[:count]:
        host, other = chance.sample(list(hosts), 2)
        schedule.append(Fault(kind, host, other, KINDS[kind].seconds, chance.uniform(0.5, 2.0)))
    return schedule
