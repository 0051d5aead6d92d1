"""Switch: an Ethernet switch of Python between TAP devices, each the network of one host, with faults on each line.

Owns the devices, which end with it, and the frames under way. Of a frame it looks at the address that it is for. Delay,
loss, cuts of one direction and lost large frames need no netem, which not every kernel has.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_BYTES_MAX = 1514  # at an MTU of 1500
FRAMES_HELD_MAX = 16384  # that are late on purpose; more are lost, as in a switch whose memory is full
BATCH_FRAMES = 64  # of one port, before the others have their turn
ARP = struct.Struct("!6s6sHHHBBH6s4s6s4s")
EVERYONE = b"\xff" * 6


@dataclass(frozen=True)
class Line:
    """What one direction of a host's line does to frames."""

    cut: bool = False
    loss: float = 0.0  # the share of frames that is lost
    delay_s: float = 0.0
    frame_bytes_max: int = FRAME_BYTES_MAX  # larger frames are lost, and nobody is told


SOUND = Line()


@dataclass
class Port:
    """A host's place at the switch; `outgoing` carries what the host sends. Lines may be set from any thread."""

    device: str
    mac: bytes
    descriptor: int
    outgoing: Line = SOUND
    incoming: Line = SOUND


@dataclass(order=True)
class _Late:
    """A frame that is held until its time."""

    due_s: float
    number: int
    port: Port = field(compare=False)
    frame: bytes = field(compare=False)


class Switch:
    """The switch, a thread. A context manager: its exit removes every device."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._ports: list[Port] = []
        self._late: list[_Late] = []
        self._held = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self.lost = 0
        """Frames that faults have lost."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        for port in self._ports:
            os.close(port.descriptor)
        os.close(self._wake)

    def plug(self) -> Port:
        """Return a port whose device is in this process's network, and must be moved and brought up by the caller."""
        descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            made = fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"parashard%d", IFF_TAP | IFF_NO_PI))
        except OSError:
            os.close(descriptor)
            raise
        mac = bytes((2, 0, 0, 0, 0, len(self._ports) + 1))
        self._ports.append(Port(made[:16].rstrip(b"\0").decode(), mac, descriptor))
        return self._ports[-1]

    def start(self) -> None:
        """Begin to carry frames; all ports are there."""
        self._thread.start()

    def announce(self, port: Port, address: bytes) -> None:
        """Tell every host that a port has an IPv4 address, as a machine does that takes one (gratuitous ARP)."""
        frame = ARP.pack(EVERYONE, port.mac, 0x0806, 1, 0x0800, 6, 4, 1, port.mac, address, EVERYONE, address)
        for other in self._ports:
            if other is not port and not (port.outgoing.cut or other.incoming.cut):
                _deliver(other, frame)

    def _run(self) -> None:
        poll = select.epoll()
        poll.register(self._wake, select.EPOLLIN)
        by_descriptor = {port.descriptor: port for port in self._ports}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.EPOLLIN)
        while not self._stopping:
            timeout_s = max(0.0, self._late[0].due_s - time.monotonic()) if self._late else -1
            for descriptor, _ in poll.poll(timeout_s):
                if descriptor in by_descriptor:
                    self._take(by_descriptor[descriptor])
            while self._late and self._late[0].due_s <= time.monotonic():
                late = heapq.heappop(self._late)
                _deliver(late.port, late.frame)
        poll.close()

    def _take(self, source: Port) -> None:
        """Carry what a host has sent."""
        for _ in range(BATCH_FRAMES):
            try:
                frame = os.read(source.descriptor, FRAME_BYTES_MAX)
            except OSError:  # no more, or the device is not up yet
                return
            if frame[0] & 1:  # to everyone
                for port in self._ports:
                    if port is not source:
                        self._carry(source, port, frame)
            elif 1 <= frame[5] <= len(self._ports):
                self._carry(source, self._ports[frame[5] - 1], frame)

    def _carry(self, source: Port, target: Port, frame: bytes) -> None:
        out, into = source.outgoing, target.incoming
        if out is SOUND and into is SOUND:
            _deliver(target, frame)
            return
        if any(
            line.cut or len(frame) > line.frame_bytes_max or self._random.random() < line.loss for line in (out, into)
        ):
            self.lost += 1
            return
        delay_s = out.delay_s + into.delay_s
        if not delay_s:
            _deliver(target, frame)
        elif len(self._late) < FRAMES_HELD_MAX:
            self._held += 1
            heapq.heappush(self._late, _Late(time.monotonic() + delay_s, self._held, target, frame))


def _deliver(port: Port, frame: bytes) -> None:
    with suppress(OSError):  # the device is down, or its queue is full
        os.write(port.descriptor, frame)
